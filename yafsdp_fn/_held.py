"""What a rank holds at each moment of a program."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ._program import Free, Program, begun

Held = dict[str, int]  # bytes by kind


def live_bytes(program: Program, coordinate: Sequence[int]) -> list[int]:
    """Bytes of values that a rank holds after each instruction, shards included.

    A view holds the memory of what it views until both are free. The scratch space of
    operators is not counted.
    """
    return [sum(held.values()) for held in held_bytes(program, coordinate)]


def peak(program: Program, coordinate: Sequence[int] | None = None) -> int:
    """The most bytes that a rank holds at once; by default the first rank.

    The arena counts whole, whatever of it is in use.
    """
    at = coordinate or program.first
    beside = (
        held.get("fresh", 0) + held.get("outputs", 0)
        for held in held_bytes(program, at)
    )
    return _kept_bytes(program, at) + program.arena + max(beside, default=0)


def split_at_peak(program: Program) -> Held:
    """What the first rank holds when it holds most, by kind."""
    nothing = {"shards": _kept_bytes(program, program.first)}
    held = held_bytes(program, program.first)
    return max(held, key=lambda kinds: sum(kinds.values()), default=nothing)


def held_bytes(program: Program, coordinate: Sequence[int]) -> list[Held]:
    """What a rank holds after each instruction, by kind.

    Kinds are those of `Buffer`, "shards" for inputs and constants, "fresh" for what has
    no place in the arena, and "outputs".
    """
    return list(_Ledger(program, coordinate).entries())


def _kept_bytes(program: Program, coordinate: Sequence[int]) -> int:
    """Bytes that are there before and after a run: inputs and constants."""
    return sum(program.values[n].nbytes(coordinate) for n in _kept(program))


def _kept(program: Program) -> set[int]:
    made = [ref for each in program.constants for ref in each.writes]
    return {program.owner.get(r.id, r.id) for r in (*program.inputs, *made)}


class _Ledger:
    """Goes through a program and writes down what comes and what goes."""

    def __init__(self, program: Program, coordinate: Sequence[int]) -> None:
        self.program, self.coordinate = program, coordinate
        self.held: Held = {"shards": _kept_bytes(program, coordinate)}
        self.fixed = _kept(program) | set(program.donated)
        returned = (ref.id for ref in program.outputs if ref is not None)
        self.returned = {program.owner.get(n, n) for n in returned}
        self.holders: dict[int, set[int]] = defaultdict(set)  # values by their owner
        self.ranges: dict[tuple[int, int], int] = defaultdict(int)  # with their holders

    def entries(self) -> Iterator[Held]:
        for instruction in self.program.instructions:
            for ref in begun(instruction):
                self.take(ref.id)
            for ref in instruction.values if isinstance(instruction, Free) else ():
                self.give(ref.id)
            yield dict(self.held)

    def take(self, number: int) -> None:
        owner = self.program.owner.get(number, number)
        if owner not in self.fixed and not self.holders[owner]:
            self.change(owner, +1)
        self.holders[owner].add(number)

    def give(self, number: int) -> None:
        owner = self.program.owner.get(number, number)
        self.holders[owner].discard(number)
        if owner not in self.fixed and not self.holders[owner]:
            self.change(owner, -1)

    def change(self, owner: int, sign: int) -> None:
        buffer = self.program.buffers.get(owner)
        if buffer is None:
            kind = "outputs" if owner in self.returned else "fresh"
            nbytes = self.program.values[owner].nbytes(self.coordinate)
        else:
            kind, nbytes = buffer.kind, buffer.nbytes
            place = (buffer.offset, buffer.nbytes)
            self.ranges[place] += sign
            # A range that is overwritten in place changes hands, and counts once.
            if self.ranges[place] != (1 if sign > 0 else 0):
                return
        self.held[kind] = self.held.get(kind, 0) + sign * nbytes
