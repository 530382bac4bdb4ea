"""lower: a placed graph becomes the graph of one rank.

Operators stay the same; the lengths that they are told become those of a rank's part.
Moves become collectives, or cuts that move nothing.
"""

from typing import Any

from ._graph import Ref
from ._layout import Split
from ._local_ops import LOCAL_OPS
from ._placed import AllGather, AllReduce, First, Placed, ReduceScatter, Slice, Step
from ._program import Adjust, Compute, Extent, Transfer

Local = Compute | Adjust | Transfer


def lower(placed: Placed) -> tuple[Local, ...]:
    """The graph of one rank, the same for all ranks up to the value of extents.

    Args:
        placed: The placed graph.

    Returns:
        Operators, cuts and collectives in the order of the placed graph.
    """
    return tuple(_lower(placed, step) for step in placed.steps)


def _lower(placed: Placed, step: Step) -> Local:
    move = step.op
    if isinstance(move, AllGather | ReduceScatter | AllReduce):
        return _transfer(step)
    (target, *_) = step.outputs
    if isinstance(move, Slice | First):
        assert target is not None
        return Adjust(move, step.operands[0].ref, target)
    op = LOCAL_OPS.get(move, move)
    args = _local_args(placed, step)
    return Compute(op, args, step.kwargs, step.outputs, step.line, step.replay)


def _transfer(step: Step) -> Transfer:
    (source,), (target,), move = step.operands, step.outputs, step.op
    assert target is not None
    reduction = getattr(move, "op", "sum")
    cuts = () if isinstance(move, AllReduce) else ((move.dim, move.chunk),)
    return Transfer(
        _KINDS[type(move)],
        move.axis,
        (source.ref,),
        (target,),
        cuts,
        reduction,
        source.label,
        step.planned,
    )


_KINDS = {
    AllGather: "all_gather",
    ReduceScatter: "reduce_scatter",
    AllReduce: "all_reduce",
}


def _local_args(placed: Placed, step: Step) -> tuple[Any, ...]:
    """Arguments with the result's shape, if they name it, made local."""
    rule = step.sharding
    if rule is None or rule.shape_argument is None or step.outputs[0] is None:
        return step.args
    position = rule.shape_argument
    shape = _extents(placed, step.outputs[0])
    return (*step.args[:position], shape, *step.args[position + 1 :])


def _extents(placed: Placed, ref: Ref) -> list[Any]:
    value = placed.values[ref.id]
    cut = {p.dim for p in value.placements if isinstance(p, Split)}
    return [
        Extent(n, d, value.placements) if d in cut else n
        for d, n in enumerate(value.meta.shape)
    ]
