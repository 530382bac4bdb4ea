"""check: the specification that every program must meet."""

from collections.abc import Sequence

from ._errors import ProgramError
from ._graph import Ref
from ._held import peak
from ._memory import may_overwrite
from ._program import (
    Buffer,
    Compute,
    Free,
    Instruction,
    Program,
    Start,
    Transfer,
    Wait,
    begun,
)
from ._shapes import Shapes


def check(program: Program, budget: float = float("inf")) -> None:
    """Check a program against its specification.

    Every value is written once and read only between its write and its release; a
    transfer's target is not read before its wait and its source not released before;
    every start has exactly one wait; ranges of the arena that are in use together are
    disjoint, but for an operator that works element by element and overwrites what ends
    with it and has the form of its result; what is returned is alive at the end; and no
    rank holds more than `budget` bytes at any moment.

    Args:
        program: Any program.
        budget: Bytes of live values that a rank may hold, inputs included.

    Raises:
        ProgramError: Names the first instruction that breaks a rule, and the rule.
    """
    state = _Checker(program)
    code = program.instructions
    for position, instruction in enumerate(code):
        state.ending = state.ends(code[position + 1 : position + 2])
        state.step(f"instruction {position}: {program._line(instruction)}", instruction)
    state.end()
    found = peak(program)
    if found > budget:
        raise ProgramError(f"peak of {found} bytes exceeds the budget of {budget}")


class _Checker:
    def __init__(self, program: Program) -> None:
        self.program, self.shapes = program, Shapes(program)
        self.shapes.owners()  # makes views out of what they view
        self.alive = {ref.id for ref in program.inputs}
        self.alive |= {ref.id for each in program.constants for ref in each.writes}
        self.written = set(self.alive)
        self.pending: dict[int, Transfer] = {}  # by the first target
        self.ranges: dict[int, Buffer] = {}  # in use, by owner
        self.scratch: set[int] = set()  # in use by transfers, not to be read
        self.ending: set[int] = set()  # owners that end with the instruction

    def ends(self, following: Sequence[Instruction]) -> set[int]:
        """The owners that the next instruction releases."""
        frees = (each for each in following if isinstance(each, Free))
        freed = {ref.id for each in frees for ref in each.values}
        left = {self._owner(number) for number in self.alive - freed}
        return {self._owner(number) for number in freed} - left

    def step(self, where: str, instruction: Instruction) -> None:
        self._require(
            where, set(instruction.reads) <= self._refs(), "reads no live value"
        )
        if isinstance(instruction, Start):
            self._start(where, instruction.transfer)
        elif isinstance(instruction, Wait):
            self._wait(where, instruction.transfer)
        elif isinstance(instruction, Free):
            self._free(where, instruction)
        for ref in instruction.writes:
            self._require(where, ref.id not in self.written, "writes a value again")
            self.written.add(ref.id)
            self.alive.add(ref.id)
        self._occupy(where, instruction)

    def end(self) -> None:
        self._require("the end", not self.pending, "a transfer without a wait")
        kept = {ref.id for ref in self.program.outputs if ref is not None}
        self._require("the end", kept <= self.alive, "returns no live value")

    def _start(self, where: str, transfer: Transfer) -> None:
        key = transfer.targets[0].id
        self._require(where, key not in self.pending, "starts a transfer twice")
        self.pending[key] = transfer

    def _wait(self, where: str, transfer: Transfer) -> None:
        started = self.pending.pop(transfer.targets[0].id, None)
        self._require(where, started is transfer, "waits for what did not start")

    def _free(self, where: str, instruction: Free) -> None:
        names = {ref.id for ref in instruction.values}
        busy = {r.id for t in self.pending.values() for r in t.held}
        here = self.alive | self.scratch
        self._require(where, names <= here, "frees no live value")
        self._require(where, not names & busy, "frees the source of a transfer")
        self.alive -= names
        self.scratch -= names
        holders = {self._owner(number) for number in self.alive | self.scratch}
        self.ranges = {n: b for n, b in self.ranges.items() if n in holders}

    def _occupy(self, where: str, instruction: Instruction) -> None:
        """Take the ranges that an instruction writes."""
        taken_now = begun(instruction)
        if isinstance(instruction, Start):
            self.scratch |= {ref.id for ref in taken_now}
        elif isinstance(instruction, Wait):
            self.scratch -= {ref.id for ref in instruction.transfer.targets}
        for number in {self._owner(ref.id) for ref in taken_now}:
            buffer = self.program.buffers.get(number)
            if buffer is not None and number not in self.ranges:
                for other, taken in self.ranges.items():
                    free = not buffer.overlaps(taken) or self._replaces(
                        instruction, number, other
                    )
                    self._require(where, free, f"overwrites {Ref(other)}")
                self.ranges[number] = buffer

    def _replaces(self, instruction: Instruction, new: int, old: int) -> bool:
        """Whether an operator may overwrite an operand."""
        read = [ref for ref in instruction.reads if self._owner(ref.id) == old]
        if not read or old not in self.ending or not isinstance(instruction, Compute):
            return False
        buffers = self.program.buffers
        same = buffers[new].offset == buffers[old].offset
        alike = all(self.shapes.alike(new, ref.id) for ref in read)
        return same and alike and may_overwrite(self.program, instruction, read)

    def _owner(self, number: int) -> int:
        return self.program.owner.get(number, number)

    def _refs(self) -> set[Ref]:
        return {Ref(number) for number in self.alive}

    def _require(self, where: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ProgramError(f"{where} {rule}")
