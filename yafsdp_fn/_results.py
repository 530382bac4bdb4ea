"""Which result is the new value of which argument, and so where it has to lie."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from ._arguments import Call
from ._errors import RetraceWarning
from ._graph import Graph, Output, Ref
from ._lines import warn

Matcher = Callable[[Call, Graph], list[int | None]]


@dataclass(frozen=True)
class Subtree:
    """A tree among the arguments or results: its structure and place in the leaves."""

    name: str
    spec: optree.PyTreeSpec
    first: int

    @property
    def positions(self) -> range:
        return range(self.first, self.first + self.spec.num_leaves)


def match(call: Call, graph: Graph) -> list[int | None]:
    """For every leaf of the result, the argument's leaf whose place it takes.

    An element of the returned tuple is matched with a state argument of the same
    structure and shapes, the one in the same position first: `(params, opt_state,
    metrics)` with `step(params, opt_state, batch)`, and `grads` with `params`.

    Args:
        call: The arguments.
        graph: The traced step.

    Returns:
        An index into the leaves of the call, or None, for every leaf of the result.
    """
    states = _states(call)
    found: list[int | None] = [None] * len(graph.outputs)
    for position, element in enumerate(_elements(graph)):
        first = states[position : position + 1]
        others = [state for state in states if state not in first]
        if first:
            _warn_of_drift(call, graph, first[0], element)
        for state in first + others:
            if _alike(call, graph, state, element):
                for out, leaf in zip(element.positions, state.positions, strict=True):
                    found[out] = leaf
                break
    return found


def _states(call: Call) -> list[Subtree]:
    subtrees, first = [], 0
    for name, spec in call.specs.items():
        if name not in call.signature.batch:
            subtrees.append(Subtree(name, spec, first))
        first += spec.num_leaves
    return subtrees


def _elements(graph: Graph) -> list[Subtree]:
    """The elements of the returned tuple, or the one value that is returned."""
    if graph.spec.type is not tuple:
        return [Subtree("output", graph.spec, 0)]
    elements, first = [], 0
    for position, spec in enumerate(graph.spec.children()):
        elements.append(Subtree(f"output[{position}]", spec, first))
        first += spec.num_leaves
    return elements


def _alike(call: Call, graph: Graph, state: Subtree, element: Subtree) -> bool:
    """Whether structure and all shapes agree, and there is something to place."""
    if state.spec != element.spec:
        return False
    pairs = zip(state.positions, element.positions, strict=True)
    return all(_same_shape(call.leaves[i], graph, graph.outputs[o]) for i, o in pairs)


def _same_shape(leaf: Any, graph: Graph, output: Output) -> bool:
    if isinstance(leaf, torch.Tensor) and isinstance(output.value, Ref):
        return tuple(leaf.shape) == graph.metas[output.value.id].shape
    if isinstance(leaf, float):
        return output.is_float or isinstance(output.value, float)
    return not isinstance(leaf, torch.Tensor) and not isinstance(output.value, Ref)


# --- drift ----------------------------------------------------------------------------


def _warn_of_drift(call: Call, graph: Graph, state: Subtree, element: Subtree) -> None:
    """Warn if an element looks like the state in its position, but is not quite."""
    before = _described(state, [_of_leaf(call.leaves[i]) for i in state.positions])
    after = _described(
        element, [_of_output(graph, graph.outputs[o]) for o in element.positions]
    )
    common = before.keys() & after.keys()
    if state.spec.type is not element.spec.type or not common:
        return
    if state.spec.type is None and not _comparable(before[""], after[""]):
        return
    for path in [*before, *(p for p in after if p not in before)]:
        old, new = before.get(path, "nothing"), after.get(path, "nothing")
        if old != new:
            warn(_drift(state.name + path, old, new), RetraceWarning)
            return


def _described(tree: Subtree, leaves: Sequence[Any]) -> Mapping[str, Any]:
    paths = [accessor.codify("") for accessor in tree.spec.accessors()]
    return dict(zip(paths, leaves, strict=True))


def _of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    return float if isinstance(leaf, float) else (type(leaf), leaf)


def _of_output(graph: Graph, output: Output) -> Any:
    if isinstance(output.value, Ref):
        meta = graph.metas[output.value.id]
        return float if output.is_float else (meta.shape, meta.dtype)
    return (
        float if isinstance(output.value, float) else (type(output.value), output.value)
    )


def _comparable(before: Any, after: Any) -> bool:
    """Whether a lone leaf may be the new value of another: same shape, not 0-dim."""
    return before[0] == after[0] if isinstance(before, tuple) and before[0] else False


def _drift(path: str, old: Any, new: Any) -> str:
    return (
        f"{path} goes in as {_shown(old)} and comes out as {_shown(new)}, so a loop "
        "that feeds it back traces the step again at every call. Return it with the "
        "structure, shape and dtype it came with (a counter as a 0-dim tensor)."
    )


def _shown(described: Any) -> str:
    if isinstance(described, tuple) and isinstance(described[0], tuple):
        return f"{described[1]}{list(described[0])}"
    if isinstance(described, tuple):
        return repr(described[1])
    return "a float" if described is float else str(described)
