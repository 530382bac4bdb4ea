"""What a rank need not compute at every step.

Values made of constants alone (angles of a rotary embedding, a causal mask) are
computed once, before the first step, however often the step writes them.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ._graph import Ref
from ._kernels import updates
from ._lower import Local as Step
from ._lower import renamed
from ._program import Adjust, Compute, Local, Transfer

_ONE = 1 << 20  # bytes of a constant that is kept
_ALL = 1 << 24  # bytes of all constants that are kept


def simplify(
    steps: Sequence[Step], values: Mapping[int, Local], returned: Collection[int]
) -> tuple[list[Compute | Adjust], list[Step]]:
    """Split a rank's graph into what is computed once and what at every step.

    Args:
        steps: The rank's graph.
        values: What is known of its values.
        returned: Numbers of the values that are handed back.

    Returns:
        What is computed once, and what at every step.
    """
    once: list[Compute | Adjust] = []
    repeated: list[Step] = []
    same: dict[Ref, Ref] = {}  # equal constants by another name
    known: dict[Hashable, Compute | Adjust] = {}
    made: set[Ref] = set()
    total = 0
    read = {ref for step in steps for ref in step.reads}
    for step in steps:
        step = renamed(step, lambda ref: same.get(ref, ref))
        step = _without_waste(step, read, returned)
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
    return once, repeated


def _without_waste(step: Step, read: Collection[Ref], returned: Collection[int]) -> Any:
    """A fused optimiser without the results that nobody wants: gradients."""
    if not isinstance(step, Compute) or not updates(step.op):
        return step
    outputs = (
        r if r in read or (r and r.id in returned) else None for r in step.outputs
    )
    return replace(step, outputs=tuple(outputs))


def _key(step: Compute | Adjust, values: Mapping[int, Local]) -> Hashable:
    """Equal for steps that make the same constants."""
    made = tuple((values[r.id].meta, values[r.id].placements) for r in step.writes)
    if isinstance(step, Adjust):
        return (step.move, step.source, made)
    kept = tuple(ref is None for ref in step.outputs)
    return (step.op, repr(step.args), repr(step.kwargs), kept, made)
