"""lower: a placed graph becomes the graph of one rank.

Operators stay the same; the lengths that they are told become those of a rank's part.
Moves become collectives, or cuts that move nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ._graph import Ref, map_leaves
from ._layout import Split
from ._local_ops import LOCAL_OPS, onednn_product, prefers_onednn
from ._placed import AllGather, AllReduce, First, Placed, ReduceScatter, Slice, Step
from ._program import Adjust, Compute, Extent, Transfer
from ._torch import onednn_linear

Local = Compute | Adjust | Transfer


def _same(ref: Ref) -> Ref:
    return ref


def renamed(
    step: Local, read: Callable[[Ref], Ref], write: Callable[[Ref], Ref] = _same
) -> Local:
    """A step with other names for what it reads and what it writes."""

    def reads(leaf: Any) -> Any:
        return read(leaf) if isinstance(leaf, Ref) else leaf

    if isinstance(step, Compute):
        args, kwargs = map_leaves(reads, (step.args, step.kwargs))
        outputs = tuple(None if ref is None else write(ref) for ref in step.outputs)
        return replace(step, args=args, kwargs=kwargs, outputs=outputs)
    if isinstance(step, Adjust):
        return replace(step, source=read(step.source), target=write(step.target))
    sources, targets = map(read, step.sources), map(write, step.targets)
    return replace(step, sources=tuple(sources), targets=tuple(targets))


def lower(placed: Placed, fast_products: bool = True) -> tuple[Local, ...]:
    """The graph of one rank, the same for all ranks up to the value of extents.

    Args:
        placed: The placed graph.
        fast_products: Whether float32 matrix products may go to a faster library.

    Returns:
        Operators, cuts and collectives in the order of the placed graph.
    """
    onednn = fast_products and prefers_onednn()
    return tuple(_lower(placed, step, onednn) for step in placed.steps)


def _lower(placed: Placed, step: Step, onednn: bool) -> Local:
    move = step.op
    if isinstance(move, AllGather | ReduceScatter | AllReduce):
        return _transfer(step)
    (target, *_) = step.outputs
    if isinstance(move, Slice | First):
        assert target is not None
        return Adjust(move, step.operands[0].ref, target)
    op = LOCAL_OPS.get(move, move)
    if onednn and move is torch.ops.aten.mm.default and _is_large_float32(step):
        op = onednn_product
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
        (source.label,),
        step.planned,
    )


def _is_large_float32(step: Step) -> bool:
    a, b = (value.meta for value in step.operands)
    on_cpu = a.device.type == "cpu" and onednn_linear is not None
    return on_cpu and a.dtype == torch.float32 and a.numel * b.shape[1] >= _LARGE


_LARGE = 1 << 20  # multiplications below which a call costs more than it saves


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
