"""Trees beside the parameters: aligned leaf by leaf, or an error with the path.

Here `None` counts as a leaf, so that a parameter without a gradient keeps its row.
"""

from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import optree
import torch
from torch import Tensor

from .._errors import ArgumentError
from .._tree import NAMESPACE

PyTree: TypeAlias = Any


def learnable(leaf: Any) -> bool:
    """Whether an optimiser moves this leaf: a floating or complex tensor."""
    # A one-byte float holds quantised weights: no arithmetic is defined on them.
    return isinstance(leaf, Tensor) and (
        leaf.is_complex() or (leaf.is_floating_point() and leaf.dtype.itemsize > 1)
    )


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: at least float32, as the fused operators do."""
    return torch.promote_types(dtype, torch.float32)


def root(x: Tensor, p: float = 2.0) -> Tensor:
    """The p-th root of x >= 0, with derivative 0 at 0, where the true one is infinite.

    A gradient of exactly 0 would else make NaN of a derivative through the optimiser.
    """
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x) ** (1 / p))


def map_learnable(fn: Callable[[Tensor], Tensor], tree: PyTree) -> PyTree:
    """The tree of `fn(leaf)`, with `None` for a leaf that no optimiser moves."""
    return optree.tree_map(
        lambda leaf: fn(leaf) if learnable(leaf) else None, tree, namespace=NAMESPACE
    )


def counter(params: PyTree) -> Tensor:
    """A 0-dim int64 zero on the parameters' device."""
    leaves = optree.tree_leaves(params, namespace=NAMESPACE)
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), None)
    return torch.zeros((), dtype=torch.int64, device=device)


def flatten(tree: PyTree) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure of a tree, `None` among the leaves."""
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)


def check_given(params: PyTree, grads: PyTree, caller: str) -> None:
    """Refuse an update without the parameters, if there is anything to update."""
    if params is None and grads is not None:
        raise ArgumentError(
            f"{caller} needs the parameters, but params is None."
            " Write update(grads, state, params)."
        )


def aligned(name: str, tree: PyTree, params: PyTree) -> list[Any]:
    """The leaves of `tree` in the order of those of `params`; None where it has none.

    Raises:
        ArgumentError: `tree` has another structure, or a leaf of another shape.
    """
    _, spec = flatten(params)
    try:
        leaves = spec.flatten_up_to(tree)
    except ValueError:
        _refuse_structure(name, tree, params)
    for accessor, leaf in zip(spec.accessors(), leaves, strict=True):
        if leaf is not None:
            _check_leaf(accessor.codify(name), leaf, accessor(params))
    return leaves


def mirrored(name: str, tree: PyTree, params: PyTree) -> list[Any]:
    """As `aligned`, for state, which must have a value for every learnable leaf."""
    leaves = aligned(name, tree, params)
    parameters, spec = flatten(params)
    for accessor, leaf, param in zip(spec.accessors(), leaves, parameters, strict=True):
        if leaf is None and learnable(param):
            raise ArgumentError(
                f"{accessor.codify(name)} is None, but its parameter is learnable."
                " Write state = init(params) with these params."
            )
    return leaves


def _refuse_structure(name: str, tree: PyTree, params: PyTree) -> NoReturn:
    problems = optree.prefix_errors(
        params, tree, none_is_leaf=True, namespace=NAMESPACE
    )
    # optree speaks of a prefix and a full tree: here the prefix is params.
    found = str(problems[0](name)).replace(f"the prefix pytree {name}", "params")
    found = found.replace("the full pytree", name)
    raise ArgumentError(
        f"{name} must have the structure of params. {found}\n"
        f"Write None in {name} for a leaf that has no value there."
    ) from None


def _check_leaf(path: str, leaf: Any, param: Any) -> None:
    found, needed = _describe(leaf), _describe(param)
    if found != needed:
        raise ArgumentError(
            f"{path} is {found}, but its parameter is {needed}."
            " Write trees of one structure and equal shapes, or None for no value."
        )


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    kind = "complex tensor" if leaf.is_complex() else "tensor"
    return f"a {kind} of shape {tuple(leaf.shape)}"
