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
    later: list[Transfer] = field(default_factory=list)  # operands are in flight

    def add(self, transfer: Transfer) -> list[Instruction]:
        """A transfer whose operand is ready, or is being transferred."""
        if self._makes(transfer.sources):
            self.later.append(transfer)
            return self.need(transfer.sources) if _is_gather(transfer) else []
        kind = (transfer.kind, transfer.axis, transfer.op, transfer.planned)
        known = self.open.get(kind)
        self.open[kind] = joined([known, transfer]) if known else transfer
        if _is_gather(transfer) or self._bytes(self.open[kind]) >= self.full:
            return self._start(kind)
        return []

    def need(self, refs: Iterable[Ref]) -> list[Instruction]:
        """Start and await what makes these values."""
        wanted, issued = set(refs), list[Instruction]()
        for transfer in list(self.later):
            if not wanted.isdisjoint(transfer.targets):
                issued += self.need(transfer.sources)
        for kind, transfer in list(self.open.items()):
            if kind in self.open and not wanted.isdisjoint(transfer.targets):
                issued += self._start(kind)
        for transfer in list(self.flying):
            if transfer in self.flying and not wanted.isdisjoint(transfer.targets):
                issued += self._wait(transfer)
        return issued

    def start_all(self) -> list[Instruction]:
        """Start what is ready: the group that it comes from has ended."""
        kinds = list(self.open)
        return [
            each for kind in kinds if kind in self.open for each in self._start(kind)
        ]

    def finish(self) -> list[Instruction]:
        """Start and await all that is left."""
        issued = self.start_all()
        while self.flying:
            issued += self._wait(self.flying[0])
            issued += self.start_all()
        return issued

    def _start(self, kind: _Kind) -> list[Instruction]:
        issued: list[Instruction] = []
        # What waits may add to this bucket, or start it.
        while kind in self.open and self.flying and self._is_full(self.open[kind]):
            issued += self._wait(self.flying[0])
        if kind in self.open:
            transfer = self._with_scratch(self.open.pop(kind))
            self.flying.append(transfer)
            issued.append(Start(transfer))
        return issued

    def _wait(self, transfer: Transfer) -> list[Instruction]:
        """Await a transfer; what reads its results is ready then."""
        self.flying.remove(transfer)
        issued: list[Instruction] = [Wait(transfer)]
        for each in list(self.later):
            if each in self.later and not self._makes(each.sources):
                self.later.remove(each)
                issued += self.add(each)
        return issued

    def _makes(self, refs: Iterable[Ref]) -> bool:
        """Whether a transfer that has not ended makes one of these values."""
        pending = (*self.open.values(), *self.flying, *self.later)
        return any(not set(refs).isdisjoint(each.targets) for each in pending)

    def _is_full(self, transfer: Transfer) -> bool:
        """Whether what is in flight leaves no room for a transfer."""
        return sum(map(self._bytes, (*self.flying, transfer))) > self.room

    def _with_scratch(self, transfer: Transfer) -> Transfer:
        if transfer.kind != "reduce_scatter":
            return transfer
        made = map(self.scratch, transfer.sources)
        return replace(transfer, scratch=tuple(ref for ref in made if ref is not None))

    def _bytes(self, transfer: Transfer) -> int:
        return sum(map(self.nbytes, transfer.sources))


def _is_gather(transfer: Transfer) -> bool:
    return transfer.kind == "all_gather"


def joined(transfers: list[Transfer]) -> Transfer:
    """Transfers of one kind as one."""
    return replace(
        transfers[0],
        sources=tuple(ref for each in transfers for ref in each.sources),
        targets=tuple(ref for each in transfers for ref in each.targets),
        cuts=tuple(cut for each in transfers for cut in each.cuts),
        labels=tuple(label for each in transfers for label in each.labels),
    )
