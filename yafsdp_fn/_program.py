"""Program: the flat list of instructions that every interpreter executes.

One program serves all ranks. What differs between ranks, the length of a part, stands
in it as an `Extent` and is filled in when a program is bound to a coordinate. So the
text of the program is the same on all ranks, and can be compared.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from ._errors import ProgramError
from ._graph import Ref, map_leaves, refs
from ._layout import Meta, Pending, Placements, Split, interval, local_shape
from ._placed import First, Slice

# --- instructions ---------------------------------------------------------------------


@dataclass(frozen=True)
class Extent:
    """The length of a rank's part of a dimension, known once the rank is."""

    size: int
    dim: int
    placements: Placements

    def at(self, coordinate: Sequence[int]) -> int:
        start, stop = interval(self.size, self.dim, self.placements, coordinate)
        return stop - start

    def __str__(self) -> str:
        return f"{self.size}/ranks"

    __repr__ = __str__


@dataclass(frozen=True)
class Compute:
    """One ATen operator on local values."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Ref | None, ...]
    line: str = ""
    replay: bool = False

    @property
    def reads(self) -> tuple[Ref, ...]:
        return tuple(refs((self.args, self.kwargs)))

    @property
    def writes(self) -> tuple[Ref, ...]:
        return tuple(ref for ref in self.outputs if ref is not None)


@dataclass(frozen=True)
class Adjust:
    """A part of a whole value, or a whole value as a pending sum: no bytes move."""

    move: Slice | First
    source: Ref
    target: Ref

    @property
    def reads(self) -> tuple[Ref, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[Ref, ...]:
        return (self.target,)


@dataclass(frozen=True)
class Transfer:
    """One collective: its operands, in the order in which all ranks name them.

    `kind` is "all_gather", "reduce_scatter" or "all_reduce"; `op` the reduction. For
    every item the ranks exchange parts of `chunk` along `dim`.
    """

    kind: str
    axis: int
    sources: tuple[Ref, ...]
    targets: tuple[Ref, ...]
    cuts: tuple[tuple[int, int], ...] = ()  # (dim, chunk) of every item
    op: str = "sum"
    label: str = ""
    planned: bool = True

    @property
    def reads(self) -> tuple[Ref, ...]:
        return self.sources

    @property
    def writes(self) -> tuple[Ref, ...]:
        return self.targets


@dataclass(frozen=True)
class Start:
    """Begin a transfer; its targets may not be read yet."""

    transfer: Transfer

    @property
    def reads(self) -> tuple[Ref, ...]:
        return self.transfer.sources

    @property
    def writes(self) -> tuple[Ref, ...]:
        return ()


@dataclass(frozen=True)
class Wait:
    """End a transfer; its targets hold their values from here on."""

    transfer: Transfer

    @property
    def reads(self) -> tuple[Ref, ...]:
        return ()

    @property
    def writes(self) -> tuple[Ref, ...]:
        return self.transfer.targets


@dataclass(frozen=True)
class Free:
    """These values are not read again."""

    values: tuple[Ref, ...]

    @property
    def reads(self) -> tuple[Ref, ...]:
        return ()

    @property
    def writes(self) -> tuple[Ref, ...]:
        return ()


Instruction = Compute | Adjust | Start | Wait | Free


@dataclass(frozen=True)
class Local:
    """What is known of a value: its global description and its placement."""

    meta: Meta
    placements: Placements
    label: str = ""

    def shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part that a rank holds."""
        return local_shape(self.meta.shape, self.placements, coordinate)

    def nbytes(self, coordinate: Sequence[int]) -> int:
        """Bytes of the part that a rank holds."""
        count = self.meta.dtype.itemsize
        for length in self.shape(coordinate):
            count *= length
        return count


# --- the program ----------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """Instructions over named values, the same on all ranks.

    Attributes:
        axes: Names of the mesh axes.
        sizes: Ranks along each axis.
        values: Description of every value, by number.
        inputs: The values that exist before the first instruction.
        outputs: The values that are handed back; `None` for a static output.
        instructions: What to do, in order.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    values: Mapping[int, Local]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref | None, ...]
    instructions: tuple[Instruction, ...]

    @property
    def mesh(self) -> str:
        """The axes with their sizes."""
        pairs = zip(self.axes, self.sizes, strict=True)
        return " × ".join(f"{name}={size}" for name, size in pairs)

    def __repr__(self) -> str:
        return f"<program of {len(self.instructions)} instructions on {self.mesh}>"

    def transfers(self) -> Iterator[Transfer]:
        """All collectives, in the order of their start."""
        for instruction in self.instructions:
            if isinstance(instruction, Start):
                yield instruction.transfer

    def as_text(self) -> str:
        """One line for each instruction.

        Values are written `%3: f32[8/4,16]`: of eight rows every rank holds a part.
        """
        lines = [f"program on mesh {self.mesh}"]
        lines += [
            f"{self.name(r):<40} input {self.values[r.id].label}" for r in self.inputs
        ]
        lines += [self._line(instruction) for instruction in self.instructions]
        shown = ", ".join("static" if r is None else str(r) for r in self.outputs)
        return "\n".join([*lines, f"return {shown}"])

    def name(self, ref: Ref) -> str:
        """A value with its dtype and how its dimensions are split."""
        value = self.values[ref.id]
        cuts = [str(n) for n in value.meta.shape]
        pending = ""
        for name, size, p in zip(self.axes, self.sizes, value.placements, strict=True):
            if isinstance(p, Split):
                cuts[p.dim] += f"/{size}"
            elif isinstance(p, Pending):
                pending += f" pending {p.op} over {name}"
        dtype = str(Meta((), value.meta.dtype, ())).removesuffix("[]")
        return f"{ref}: {dtype}[{','.join(cuts)}]{pending}"

    def _line(self, instruction: Instruction) -> str:
        if isinstance(instruction, Compute):
            return self._compute_line(instruction)
        if isinstance(instruction, Adjust):
            name = type(instruction.move).__name__.lower()
            return f"{self.name(instruction.target):<40} {name} {instruction.source}"
        if isinstance(instruction, Free):
            return f"free {', '.join(map(str, instruction.values))}"
        return self._transfer_line(instruction)

    def _compute_line(self, instruction: Compute) -> str:
        outputs = ", ".join(self.name(r) for r in instruction.writes)
        named = [str(a) for a in instruction.args]
        named += [f"{k}={v}" for k, v in instruction.kwargs.items() if v is not None]
        op = instruction.op  # an ATen operator, or a function in the place of one
        name = op.__name__ if isinstance(op, FunctionType) else str(op)
        call = f"{name}({', '.join(named)})"
        line = instruction.line.rpartition("/")[2]
        return f"{outputs:<40} {call:<48} # {line}".rstrip()

    def _transfer_line(self, instruction: Start | Wait) -> str:
        transfer = instruction.transfer
        word = "gather" if transfer.kind == "all_gather" else "reduce"
        if isinstance(instruction, Wait):
            names = ", ".join(self.name(r) for r in transfer.targets)
            return f"{names:<40} {word}_wait"
        moved = sum(self.values[r.id].meta.nbytes for r in transfer.sources)
        sources = ", ".join(map(str, transfer.sources))
        planned = "" if transfer.planned else " unplanned"
        what = f"{word}_start {sources} {transfer.kind} over {self.axes[transfer.axis]}"
        return f"{'':<40} {what}, {moved} bytes{planned} # {transfer.label}".rstrip(
            " #"
        )


def bind(arguments: Any, coordinate: Sequence[int]) -> Any:
    """Arguments with every extent filled in for a rank."""
    return map_leaves(
        lambda leaf: leaf.at(coordinate) if isinstance(leaf, Extent) else leaf,
        arguments,
    )


# --- the specification ----------------------------------------------------------------


def check(program: Program, budget: float = float("inf")) -> None:
    """Check a program against its specification.

    Every value is written once and read only between its write and its release; a
    transfer's target is not read before its wait and its source not released before;
    every start has exactly one wait; what is returned is alive at the end; and no rank
    holds more than `budget` bytes at any moment.

    Args:
        program: Any program.
        budget: Bytes of live values that a rank may hold, inputs included.

    Raises:
        ProgramError: Names the first instruction that breaks a rule, and the rule.
    """
    state = _Checker(program)
    for position, instruction in enumerate(program.instructions):
        state.step(f"instruction {position}: {program._line(instruction)}", instruction)
    state.end()
    found = peak(program)
    if found > budget:
        raise ProgramError(f"peak of {found} bytes exceeds the budget of {budget}")


class _Checker:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.alive = {ref.id for ref in program.inputs}
        self.written = set(self.alive)
        self.pending: dict[int, Transfer] = {}  # by the first target

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
        busy = {r.id for t in self.pending.values() for r in t.sources}
        self._require(where, names <= self.alive, "frees no live value")
        self._require(where, not names & busy, "frees the source of a transfer")
        self.alive -= names

    def _refs(self) -> set[Ref]:
        return {Ref(number) for number in self.alive}

    def _require(self, where: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ProgramError(f"{where} {rule}")


def live_bytes(program: Program, coordinate: Sequence[int]) -> Iterator[int]:
    """Bytes of values that a rank holds after each instruction.

    A view holds the memory of what it views until both are free. The scratch space of
    operators is not counted.
    """
    owner_of = owners(program)
    holders = Counter(owner_of[ref.id] for ref in program.inputs)
    total = sum(_held(program, number, coordinate) for number in holders)
    for instruction in program.instructions:
        begun = instruction.transfer.targets if isinstance(instruction, Start) else ()
        ended = isinstance(instruction, Wait)  # counted at their start
        for ref in begun or (() if ended else instruction.writes):
            owner = owner_of[ref.id]
            total += 0 if holders[owner] else _held(program, owner, coordinate)
            holders[owner] += 1
        for ref in instruction.values if isinstance(instruction, Free) else ():
            owner = owner_of[ref.id]
            holders[owner] -= 1
            total -= 0 if holders[owner] else _held(program, owner, coordinate)
        yield total


def peak(program: Program, coordinate: Sequence[int] | None = None) -> int:
    """The most bytes of values that a rank holds at once; by default the first rank."""
    at = coordinate or (0,) * len(program.sizes)
    inputs = sum(_held(program, ref.id, at) for ref in program.inputs)
    return max(live_bytes(program, at), default=inputs)


def _held(program: Program, number: int, coordinate: Sequence[int]) -> int:
    return program.values[number].nbytes(coordinate)


def owners(program: Program) -> dict[int, int]:
    """For every value, the one whose memory it shares: itself, if it is no view."""
    found = {number: number for number in program.values}
    for instruction in program.instructions:
        if isinstance(instruction, Compute) and _is_view(instruction.op):
            for ref in instruction.writes:
                found[ref.id] = found[instruction.reads[0].id]
        elif isinstance(instruction, Adjust) and isinstance(instruction.move, Slice):
            found[instruction.target.id] = found[instruction.source.id]
    return found


def _is_view(op: Any) -> bool:
    return getattr(op, "is_view", False) or str(op).startswith("aten.reshape")
