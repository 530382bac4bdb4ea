"""What a rank need not compute at every step.

Values made of constants alone (angles of a rotary embedding, a causal mask) are
computed once, before the first step, however often the step writes them.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ._graph import Ref, map_leaves
from ._lower import Local as Step
from ._program import Adjust, Compute, Local, Transfer

_Outputs = tuple[Ref | None, ...]
_ONE = 1 << 20  # bytes of a constant that is kept
_ALL = 1 << 24  # bytes of all constants that are kept


def simplify(
    steps: Sequence[Step], values: Mapping[int, Local], outputs: _Outputs
) -> tuple[list[Compute | Adjust], list[Step], _Outputs]:
    """Split a rank's graph into what is computed once and what at every step.

    Args:
        steps: The rank's graph.
        values: What is known of its values.
        outputs: The values that are handed back.

    Returns:
        What is computed once, what at every step, and the outputs.
    """
    returned = {ref.id for ref in outputs if ref is not None}
    once: list[Compute | Adjust] = []
    repeated: list[Step] = []
    same: dict[Ref, Ref] = {}  # equal constants by another name
    known: dict[Hashable, Compute | Adjust] = {}
    made: set[Ref] = set()
    total = 0
    for step in steps:
        step = _renamed(step, same)
        size = sum(values[r.id].meta.nbytes for r in step.writes)
        fits = size <= _ONE and total + size <= _ALL
        constant = not isinstance(step, Transfer) and made.issuperset(step.reads)
        if not (constant and fits) or any(r.id in returned for r in step.writes):
            repeated.append(step)
            continue
        assert not isinstance(step, Transfer)
        twin = known.setdefault(_key(step, values), step)
        if twin is step:
            once.append(step)
            made.update(step.writes)
            total += size
        else:
            same.update(zip(step.writes, twin.writes, strict=True))
    return once, repeated, outputs


def _key(step: Compute | Adjust, values: Mapping[int, Local]) -> Hashable:
    """Equal for steps that make the same constants."""
    made = tuple((values[r.id].meta, values[r.id].placements) for r in step.writes)
    if isinstance(step, Adjust):
        return (step.move, step.source, made)
    kept = tuple(ref is None for ref in step.outputs)
    return (step.op, repr(step.args), repr(step.kwargs), kept, made)


def _renamed(step: Step, same: Mapping[Ref, Ref]) -> Any:
    if same.keys().isdisjoint(step.reads):
        return step
    from dataclasses import replace

    def name(leaf: Any) -> Any:
        return same.get(leaf, leaf) if isinstance(leaf, Ref) else leaf

    if isinstance(step, Compute):
        args, kwargs = map_leaves(name, (step.args, step.kwargs))
        return replace(step, args=args, kwargs=kwargs)
    if isinstance(step, Adjust):
        return replace(step, source=name(step.source))
    return replace(step, sources=map_leaves(name, step.sources))
