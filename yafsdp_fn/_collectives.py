"""How a transfer is done: packed parts, one exchange, unpacked results.

What lies in the arena as rows in order is packed already: collectives read and write it
where it is. All else is copied once. Packing and summing are the same for real and
emulated ranks, so that both give the same bits. What goes over the wire is bytes, so
every dtype can be exchanged.

gloo's collectives copy (an all-gather through memory of its own) or move too much (a
reduce-scatter all-reduces, and sums bfloat16 in bfloat16), and every one of them waits
for a thread. Its point-to-point messages go straight from memory to memory: an exchange
of messages, and a sum in rank order, take their place and move the same bytes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ._bind import Rank
from ._program import Transfer
from ._ranks import waiting
from ._shapes import is_direct
from ._shared import Neighbours
from ._torch import all_gather_single, reduce_scatter_single

Wait = Callable[[], None]
Finish = Callable[[], Any]

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


def combine(
    parts: Sequence[torch.Tensor], op: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Reduce tensors of one shape in their order, into `out` if it is given.

    Sums of 16-bit floats are taken in float32.
    """
    first, *rest = parts
    if op == "sum" and first.dtype in (torch.float16, torch.bfloat16):
        total = combine([part.float() for part in parts], op)
        return total.to(first.dtype) if out is None else out.copy_(total)
    if not rest:
        return first.clone() if out is None else out.copy_(first)
    reduce: Any = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    total = reduce(first, rest[0], out=out)
    for part in rest[1:]:
        reduce(total, part, out=total)
    return total


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
        total = combine(sources, transfer.op)
        return [total] * len(sources)
    dim, chunk = transfer.cuts[item]
    if transfer.kind == "all_gather":
        whole = torch.cat([pack(source, dim, chunk) for source in sources])
        return [unpack(whole, dim, length) for length in lengths]
    ranks = len(sources)
    packed = torch.stack([pack(source, dim, ranks * chunk) for source in sources])
    parts = packed.unflatten(1, (ranks, chunk))
    return [
        unpack(combine(list(parts[:, rank]), "sum"), dim, length)
        for rank, length in enumerate(lengths)
    ]


# --- processes ------------------------------------------------------------------------


@dataclass(frozen=True)
class Channel:
    """Where an item is exchanged; messages of different tags are not mixed up."""

    group: dist.ProcessGroup
    tag: int
    near: Neighbours | None = None  # the group's ranks, if all are on this host


@dataclass(frozen=True)
class Backend:
    """How one kind of process group exchanges packed parts, begun asynchronously.

    `reduce_scatter` writes the parts of all other ranks, to be summed, if it `receives`
    them; else their sum.
    """

    all_gather: Callable[[torch.Tensor, torch.Tensor, Channel], Wait]
    reduce_scatter: Callable[[torch.Tensor, torch.Tensor, Channel], Wait]
    all_reduce: Callable[[torch.Tensor, str, Channel], Finish]
    receives: bool


class Exchange:
    """A transfer of a rank with the other processes along its axis.

    Args:
        rank: The rank.
        transfer: What to do.
        group: The processes along the axis.
        number: How many items the program's transfers along the axis have before it.
        near: The ranks of the group, if all are on this host.
    """

    def __init__(
        self,
        rank: Rank,
        transfer: Transfer,
        group: dist.ProcessGroup,
        number: int,
        near: Neighbours | None,
    ) -> None:
        self.rank, self.transfer, self.group = rank, transfer, group
        self.number, self.near = number, near
        self.ranks = dist.get_world_size(group)
        self.backend = BACKENDS[dist.get_backend(group)]
        self.finishing: list[Finish] = []
        begin = {
            "all_gather": self._gathers,
            "reduce_scatter": self._scatters,
            "all_reduce": self._reduces,
        }[transfer.kind]
        self.begin = [begin(item) for item in range(len(transfer.sources))]

    def start(self) -> None:
        """Begin to exchange all items."""
        self.finishing = [begin() for begin in self.begin]

    def wait(self) -> None:
        """Wait, and leave the results where they are wanted."""
        for finish in self.finishing:
            finish()
        self.finishing = []

    # --- one item: a function that begins it, and returns one that ends it ---

    def _gathers(self, item: int) -> Callable[[], Finish]:
        source, target, dim, chunk = self._item(item)
        place = self._place(target, dim, self.ranks * chunk)
        values, gather = self.rank.values, self.backend.all_gather
        channel = self._channel(item)
        rows = self._rows(target, dim)

        def begin() -> Finish:
            part = pack(values[source], dim, chunk)
            whole = place
            if whole is None:
                whole = part.new_empty((self.ranks * chunk, *part.shape[1:]))
            wait = gather(whole, part, channel)

            def finish(_: torch.Tensor = part) -> None:
                wait()
                if place is None:
                    self.rank.put(target, unpack(whole, dim, rows))

            return finish

        return begin

    def _scatters(self, item: int) -> Callable[[], Finish]:
        source, target, dim, chunk = self._item(item)
        packed_place = self._place(source, dim, self.ranks * chunk)
        place = self.rank.values[target] if target in self.rank.fixed else None
        values, backend = self.rank.values, self.backend
        channel = self._channel(item)
        rows = self._rows(target, dim)
        received, own = self._scratch(item, dim, chunk), dist.get_rank(self.group)

        def begin() -> Finish:
            packed = packed_place
            if packed is None:
                packed = pack(values[source], dim, self.ranks * chunk)
            out = received
            if out is None:
                length = self.ranks * chunk if backend.receives else chunk
                out = packed.new_empty((length, *packed.shape[1:]))
            wait = backend.reduce_scatter(out, packed, channel)

            def finish(_: torch.Tensor = packed) -> None:
                wait()
                if not backend.receives:
                    self.rank.put(target, unpack(out, dim, rows))
                    return
                parts = [
                    (packed if n == own else out)[n * chunk : n * chunk + rows]
                    for n in range(self.ranks)
                ]
                if place is not None:
                    combine(parts, "sum", place)
                else:
                    self.rank.put(target, unpack(combine(parts, "sum"), dim, rows))

            return finish

        return begin

    def _reduces(self, item: int) -> Callable[[], Finish]:
        source, target = self.transfer.sources[item].id, self.transfer.targets[item].id
        values, op, channel = self.rank.values, self.transfer.op, self._channel(item)

        def begin() -> Finish:
            done = self.backend.all_reduce(values[source], op, channel)
            return lambda: self.rank.put(target, done())

        return begin

    def _channel(self, item: int) -> Channel:
        return Channel(self.group, self.number + item, self.near)

    # --- where things lie ---

    def _item(self, item: int) -> tuple[int, int, int, int]:
        transfer = self.transfer
        dim, chunk = transfer.cuts[item]
        return transfer.sources[item].id, transfer.targets[item].id, dim, chunk

    def _rows(self, target: int, dim: int) -> int:
        return self.rank.program.values[target].shape(self.rank.coordinate)[dim]

    def _place(self, number: int, dim: int, rows: int) -> torch.Tensor | None:
        """A value in the arena as rows, with those that pad it; None if it isn't."""
        program = self.rank.program
        owner, local = program.owner.get(number, number), program.values[number]
        buffer, shape = program.buffers.get(owner), local.shape(self.rank.coordinate)
        if buffer is None or number not in self.rank.fixed or not shape:
            return None
        tensor, count = self.rank.values[number], rows * math.prod(shape[1:])
        whole = self.rank.view(owner, local.meta.dtype)
        starts = tensor.storage_offset() == whole.storage_offset()
        direct = is_direct(local.meta, dim) and tensor.is_contiguous() and starts
        if not direct or whole.numel() < count:
            return None
        return whole[:count].view(rows, *shape[1:])

    def _scratch(self, item: int, dim: int, chunk: int) -> torch.Tensor | None:
        """Memory for the parts that the other ranks send."""
        if item >= len(self.transfer.scratch):
            return None
        source = self.rank.program.values[self.transfer.sources[item].id]
        shape = source.shape(self.rank.coordinate)
        rest = [n for d, n in enumerate(shape) if d != dim]
        count = self.ranks * chunk * math.prod(rest)
        scratch = self.transfer.scratch[item].id
        return self.rank.view(scratch, source.meta.dtype)[:count].view(-1, *rest)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# --- gloo ---


def _gather(whole: torch.Tensor, part: torch.Tensor, channel: Channel) -> Wait:
    """Every rank's part goes to all."""
    ranks, own = dist.get_world_size(channel.group), dist.get_rank(channel.group)
    rows, sent = _as_bytes(whole).view(ranks, -1), _as_bytes(part)
    wait = _messages([sent] * ranks, list(rows), channel)
    rows[own].copy_(sent)
    return wait


def _exchange(received: torch.Tensor, packed: torch.Tensor, channel: Channel) -> Wait:
    """Every rank's part of the operand goes to that rank; a rank's own stays there."""
    ranks = dist.get_world_size(channel.group)
    rows, sent = (_as_bytes(x).view(ranks, -1) for x in (received, packed))
    return _messages(list(sent), list(rows), channel)


def _messages(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], channel: Channel
) -> Wait:
    """Send to and receive from every other rank, the next one first."""
    group, tag, near = channel.group, channel.tag, channel.near
    if near is not None and sent[0].numel() and near.holds(received[0]):
        return near.exchange(sent, received, tag)
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    works: list[Any] = []
    with waiting(group):
        for distance in range(1, ranks if sent[0].numel() else 1):
            source, target = (own - distance) % ranks, (own + distance) % ranks
            works += [
                dist.irecv(received[source], group=group, tag=tag, group_src=source),
                dist.isend(sent[target], group=group, tag=tag, group_dst=target),
            ]

    def wait(_: Any = (sent, received)) -> None:
        with waiting(group):
            for work in works:
                work.wait()

    return wait


_SMALL = 1 << 16  # bytes below which one round trip costs more than ranks × bytes


def _gather_and_reduce(value: torch.Tensor, op: str, channel: Channel) -> Finish:
    """All-reduce with its sum in rank order, the same on all ranks."""
    ranks = dist.get_world_size(channel.group)
    if value.nbytes <= _SMALL or op != "sum":
        row = value.reshape(1, -1)
        rows = row.new_empty((ranks, row.shape[1]))
        return _then(_gather(rows, row, channel), lambda: _reduced(rows, op, value))
    flat = value.reshape(-1)
    chunk = -(-flat.numel() // ranks)
    packed = pack(flat, 0, ranks * chunk)
    received = torch.empty_like(packed)

    def gathered() -> torch.Tensor:
        rows, own = list(received.view(ranks, chunk)), dist.get_rank(channel.group)
        rows[own] = packed.view(ranks, chunk)[own]
        part = combine(rows, "sum")
        whole = part.new_empty(ranks * chunk)
        _gather(whole, part, channel)()
        return whole[: flat.numel()].view(value.shape)

    return _then(_exchange(received, packed, channel), gathered)


def _reduced(rows: torch.Tensor, op: str, like: torch.Tensor) -> torch.Tensor:
    return combine(list(rows), op).view(like.shape) if like.numel() else like


def _then(wait: Wait, result: Finish) -> Finish:
    def finish() -> Any:
        wait()
        return result()

    return finish


# --- NCCL ---


def _waiting(work: dist.Work | None, *alive: torch.Tensor) -> Wait:
    """The end of a collective; `alive` are the buffers that it reads and writes."""

    def wait(_: Sequence[torch.Tensor] = alive) -> None:
        if work is not None:
            work.wait()

    return wait


def _native_all_gather(
    whole: torch.Tensor, part: torch.Tensor, channel: Channel
) -> Wait:
    if not part.numel():
        return _waiting(None)
    bytes_of_all, own = _as_bytes(whole), _as_bytes(part)
    work = all_gather_single(bytes_of_all, own, group=channel.group, async_op=True)
    return _waiting(work, whole, part)


def _native_reduce_scatter(
    part: torch.Tensor, packed: torch.Tensor, channel: Channel
) -> Wait:
    if not part.numel():
        return _waiting(None)
    work = reduce_scatter_single(part, packed, group=channel.group, async_op=True)
    return _waiting(work, part, packed)


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _native_all_reduce(value: torch.Tensor, op: str, channel: Channel) -> Finish:
    total = value.to(torch.uint8) if value.dtype == torch.bool else value.clone()
    work = dist.all_reduce(total, _OPS[op], group=channel.group, async_op=True)
    return _then(_waiting(work, total), lambda: total.to(value.dtype))


BACKENDS = {
    "gloo": Backend(_gather, _exchange, _gather_and_reduce, receives=True),
    "nccl": Backend(
        _native_all_gather, _native_reduce_scatter, _native_all_reduce, receives=False
    ),
}
