"""How a transfer is done: packed parts, one exchange, unpacked results.

Packing and summing are the same for real and emulated ranks, so that both give the
same bits. What goes over the wire is bytes, so every dtype can be exchanged.

gloo has no reduce-scatter worth the name (it all-reduces, twice the bytes, and sums
bfloat16 in bfloat16): an all-to-all and a sum in rank order take its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ._program import Transfer
from ._torch import all_gather_single, reduce_scatter_single

Finish = Callable[[], torch.Tensor]

# --- packing --------------------------------------------------------------------------


def pack(part: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """`dim` in front, contiguous, padded at its end to `rows`.

    A contiguous part of the full length is returned as it is: no copy.
    """
    front = part.movedim(dim, 0)
    if front.shape[0] == rows:
        return front.contiguous()
    padded = front.new_zeros((rows, *front.shape[1:]))
    padded[: front.shape[0]] = front
    return padded


def unpack(packed: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """The first `rows` of a packed value, with `dim` back in its place: a view."""
    return packed.narrow(0, 0, rows).movedim(0, dim)


def in_order(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A value with its dimensions in memory in the order that `stride` has them.

    Kernels are chosen while a step is traced, some of them for the strides that they
    see then; what a collective writes must not lie in another order.
    """
    order = sorted(range(tensor.dim()), key=lambda dim: -stride[dim])
    seen = [tensor.stride(d) for d in order if tensor.shape[d] > 1]
    if seen == sorted(seen, reverse=True):
        return tensor
    inverse = sorted(range(tensor.dim()), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(inverse)


def combine(parts: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce `[ranks, ...]` over its first dimension, in rank order.

    Sums of 16-bit floats are taken in float32.
    """
    if op == "sum":
        low = parts.dtype in (torch.float16, torch.bfloat16)
        total = parts.sum(0, dtype=torch.float32 if low else parts.dtype)
        return total.to(parts.dtype)
    extreme = torch.amax if op == "max" else torch.amin
    return extreme(parts, 0)


# --- emulated ranks -------------------------------------------------------------------


def exchange(
    transfer: Transfer,
    item: int,
    sources: Sequence[torch.Tensor],
    lengths: Sequence[int],
) -> list[torch.Tensor]:
    """One item of a transfer between ranks that all live here.

    Args:
        transfer: What to do.
        item: Which of its items.
        sources: The operand of every rank along the axis.
        lengths: Of every rank, the length of `dim` of its result.

    Returns:
        The result of every rank; ranks may share memory.
    """
    if transfer.kind == "all_reduce":
        total = combine(torch.stack(list(sources)), transfer.op)
        return [total] * len(sources)
    dim, chunk = transfer.cuts[item]
    if transfer.kind == "all_gather":
        whole = torch.cat([pack(source, dim, chunk) for source in sources])
        return [unpack(whole, dim, length) for length in lengths]
    ranks = len(sources)
    packed = torch.stack([pack(source, dim, ranks * chunk) for source in sources])
    parts = packed.unflatten(1, (ranks, chunk))
    return [
        unpack(combine(parts[:, rank].contiguous(), "sum"), dim, length)
        for rank, length in enumerate(lengths)
    ]


# --- processes ------------------------------------------------------------------------


@dataclass(frozen=True)
class Backend:
    """How one kind of process group exchanges packed parts, begun asynchronously."""

    all_gather: Callable[[torch.Tensor, dist.ProcessGroup], Finish]
    reduce_scatter: Callable[[torch.Tensor, dist.ProcessGroup], Finish]
    all_reduce: Callable[[torch.Tensor, str, dist.ProcessGroup], Finish]


def start(
    transfer: Transfer,
    item: int,
    source: torch.Tensor,
    length: int,
    group: dist.ProcessGroup,
) -> Finish:
    """Begin one item of a transfer; the function that is returned waits for it.

    Args:
        transfer: What to do.
        item: Which of its items.
        source: This rank's operand.
        length: The length of `dim` of this rank's result.
        group: The ranks along the axis.
    """
    backend = BACKENDS[dist.get_backend(group)]
    if transfer.kind == "all_reduce":
        return backend.all_reduce(source, transfer.op, group)
    dim, chunk = transfer.cuts[item]
    if transfer.kind == "all_gather":
        finish = backend.all_gather(pack(source, dim, chunk), group)
    else:
        packed = pack(source, dim, dist.get_world_size(group) * chunk)
        finish = backend.reduce_scatter(packed, group)
    return lambda: unpack(finish(), dim, length)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _gather(packed: torch.Tensor, group: dist.ProcessGroup) -> Finish:
    """All-gather of bytes, so that every dtype can be gathered."""
    ranks = dist.get_world_size(group)
    whole = packed.new_empty((ranks * packed.shape[0], *packed.shape[1:]))
    if packed.numel() == 0:
        return lambda: whole
    work = all_gather_single(
        _as_bytes(whole), _as_bytes(packed), group=group, async_op=True
    )
    return _after(work, whole, packed)


def _after(
    work: dist.Work | None, result: torch.Tensor, *alive: torch.Tensor
) -> Finish:
    """Wait, then hand out the result; `alive` are the buffers still being read."""

    def finish(buffers: tuple[torch.Tensor, ...] = alive) -> torch.Tensor:
        if work is not None:
            work.wait()
        return result

    return finish


def _exchange_and_sum(packed: torch.Tensor, group: dist.ProcessGroup) -> Finish:
    """Reduce-scatter as an all-to-all of bytes and a local sum in rank order."""
    ranks = dist.get_world_size(group)
    received = torch.empty_like(packed)
    parts = received.unflatten(0, (ranks, -1))
    if packed.numel() == 0:
        return lambda: parts[0]
    work = dist.all_to_all_single(
        _as_bytes(received), _as_bytes(packed), group=group, async_op=True
    )
    done = _after(work, parts, packed)
    return lambda: combine(done(), "sum")


_SMALL = 1 << 16  # bytes below which one round trip costs more than ranks × bytes


def _gather_and_reduce(
    value: torch.Tensor, op: str, group: dist.ProcessGroup
) -> Finish:
    """All-reduce with its sum in rank order, the same on all ranks."""
    ranks = dist.get_world_size(group)
    if value.nbytes <= _SMALL or op != "sum":
        done = _gather(value.reshape(1, -1), group)
        return lambda: combine(done(), op).view(value.shape)
    flat = value.reshape(-1)
    chunk = -(-flat.numel() // ranks)
    reduced = _exchange_and_sum(pack(flat, 0, ranks * chunk), group)
    return lambda: _gather(reduced(), group)()[: flat.numel()].view(value.shape)


def _native_reduce_scatter(packed: torch.Tensor, group: dist.ProcessGroup) -> Finish:
    ranks = dist.get_world_size(group)
    part = packed.new_empty((packed.shape[0] // ranks, *packed.shape[1:]))
    work = reduce_scatter_single(part, packed, group=group, async_op=True)
    return _after(work, part, packed)


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _native_all_reduce(
    value: torch.Tensor, op: str, group: dist.ProcessGroup
) -> Finish:
    total = value.to(torch.uint8) if value.dtype == torch.bool else value.clone()
    work = dist.all_reduce(total, _OPS[op], group=group, async_op=True)
    done = _after(work, total)
    return lambda: done().to(value.dtype)


BACKENDS = {
    "gloo": Backend(_gather, _exchange_and_sum, _gather_and_reduce),
    "nccl": Backend(_gather, _native_reduce_scatter, _native_all_reduce),
}
