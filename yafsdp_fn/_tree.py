"""Pytrees: flattened with optree here, at the edge, and nowhere else.

`None` is a node without leaves. Classes registered in optree, in the global namespace
or in the namespace "yafsdp_fn", are nodes; what is not registered is a leaf.
"""

from collections.abc import Callable
from typing import Any

import optree

NAMESPACE = "yafsdp_fn"


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure of a tree."""
    return optree.tree_flatten(tree, namespace=NAMESPACE)


def flatten_with_paths(
    tree: Any, root: str
) -> tuple[list[str], list[Any], optree.PyTreeSpec]:
    """Leaves with the Python expression that reaches each of them from `root`.

    >>> flatten_with_paths({"w": [1, 2]}, "params")[0]
    ["params['w'][0]", "params['w'][1]"]
    """
    accessors, leaves, spec = optree.tree_flatten_with_accessor(
        tree, namespace=NAMESPACE
    )
    return [accessor.codify(root) for accessor in accessors], leaves, spec


def map_with_paths(fn: Callable[[str, Any], Any], tree: Any, root: str) -> Any:
    """The tree of `fn(path, leaf)`."""
    paths, leaves, spec = flatten_with_paths(tree, root)
    mapped = [fn(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    return optree.tree_unflatten(spec, mapped)


def unflatten(spec: optree.PyTreeSpec, leaves: list[Any]) -> Any:
    """The tree of a structure and its leaves."""
    return optree.tree_unflatten(spec, leaves)
