"""When reductions start and when they are awaited.

Pending sums that become ready one after another travel in one bucket. A bucket starts
as soon as it is large enough, at the end of its group, or when one of its results is
read. It is awaited as late as that, or once too many gradients are in flight: two
buffers of gradients serve all layers, as in YaFSDP.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ._graph import Ref
from ._program import Instruction, Start, Transfer, Wait

_Kind = tuple[str, int, str, bool]


@dataclass
class Buckets:
    """The transfers of a program, but for the gathers of groups.

    Attributes:
        nbytes: Bytes of a value on a rank.
        scratch: A new name for what the ranks send of a value, or None where a backend
            needs no memory for it.
        full: Bytes at which a bucket starts.
        room: Bytes of gradients that may be in flight.
    """

    nbytes: Callable[[Ref], int]
    scratch: Callable[[Ref], Ref | None]
    full: float
    room: float
    open: dict[_Kind, Transfer] = field(default_factory=dict)
    flying: list[Transfer] = field(default_factory=list)

    def add(self, transfer: Transfer) -> list[Instruction]:
        """A transfer whose operand is ready."""
        kind = (transfer.kind, transfer.axis, transfer.op, transfer.planned)
        known = self.open.get(kind)
        self.open[kind] = joined([known, transfer]) if known else transfer
        if transfer.kind == "all_gather" or self._bytes(self.open[kind]) >= self.full:
            return self._start(kind)
        return []

    def need(self, refs: Iterable[Ref]) -> list[Instruction]:
        """Start and await what makes these values."""
        wanted, issued = set(refs), []
        for kind, transfer in list(self.open.items()):
            if not wanted.isdisjoint(transfer.targets):
                issued += self._start(kind)
        for transfer in list(self.flying):
            if not wanted.isdisjoint(transfer.targets):
                issued.append(self._wait(transfer))
        return issued

    def start_all(self) -> list[Instruction]:
        """Start what is ready: the group that it comes from has ended."""
        return [each for kind in list(self.open) for each in self._start(kind)]

    def finish(self) -> list[Instruction]:
        """Start and await all that is left."""
        issued = self.start_all()
        return [*issued, *(self._wait(transfer) for transfer in list(self.flying))]

    def _start(self, kind: _Kind) -> list[Instruction]:
        transfer = self._with_scratch(self.open.pop(kind))
        issued: list[Instruction] = []
        held = sum(map(self._bytes, self.flying))
        while self.flying and held + self._bytes(transfer) > self.room:
            oldest = self.flying[0]
            held -= self._bytes(oldest)
            issued.append(self._wait(oldest))
        self.flying.append(transfer)
        return [*issued, Start(transfer)]

    def _wait(self, transfer: Transfer) -> Instruction:
        self.flying.remove(transfer)
        return Wait(transfer)

    def _with_scratch(self, transfer: Transfer) -> Transfer:
        if transfer.kind != "reduce_scatter":
            return transfer
        made = map(self.scratch, transfer.sources)
        return replace(transfer, scratch=tuple(ref for ref in made if ref is not None))

    def _bytes(self, transfer: Transfer) -> int:
        return sum(map(self.nbytes, transfer.sources))


def joined(transfers: list[Transfer]) -> Transfer:
    """Transfers of one kind as one."""
    return replace(
        transfers[0],
        sources=tuple(ref for each in transfers for ref in each.sources),
        targets=tuple(ref for each in transfers for ref in each.targets),
        cuts=tuple(cut for each in transfers for cut in each.cuts),
        labels=tuple(label for each in transfers for label in each.labels),
    )
