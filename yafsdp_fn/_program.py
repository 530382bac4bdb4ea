"""Program: the flat list of instructions that every interpreter executes.

One program serves all ranks. What differs between ranks, the length of a part, stands
in it as an `Extent` and is filled in when a program is bound to a coordinate. So the
text of the program is the same on all ranks, and can be compared.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import Any

import torch

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
    labels: tuple[str, ...] = ()  # the leaf of every item, if it is one's
    planned: bool = True
    scratch: tuple[Ref, ...] = ()  # what the other ranks send of every item

    @property
    def held(self) -> tuple[Ref, ...]:
        """What is in use from the start to the wait."""
        return (*self.sources, *self.targets, *self.scratch)

    @property
    def whole(self) -> tuple[Ref, ...]:
        """The values of which a rank holds all: results of gathers, else operands."""
        return self.targets if self.kind == "all_gather" else self.sources

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
        return math.prod(self.shape(coordinate)) * self.meta.dtype.itemsize


@dataclass(frozen=True)
class Buffer:
    """Where a value lies in the arena, in bytes.

    `kind` is "gathered" (parameters), "gradients" (pending sums and what the other
    ranks send of them), "activations" (kept from one group of parameters to a later
    one) or "temporaries".
    """

    offset: int
    nbytes: int
    kind: str

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def overlaps(self, other: "Buffer") -> bool:
        return self.offset < other.end and other.offset < self.end


def begun(instruction: Instruction) -> tuple[Ref, ...]:
    """The values whose memory is in use from an instruction on."""
    if isinstance(instruction, Start):
        return (*instruction.transfer.targets, *instruction.transfer.scratch)
    return () if isinstance(instruction, Wait) else instruction.writes


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
        constants: What is computed once, before the first run, and kept.
        owner: For every value the one whose memory it shares: itself, if it is no view.
        buffers: Where owners lie in the arena; one without a buffer is allocated when
            it is computed.
        arena: Bytes of the arena.
        donated: Owners that are written into the memory of an input.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    values: Mapping[int, Local]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref | None, ...]
    instructions: tuple[Instruction, ...]
    constants: tuple[Compute | Adjust, ...] = ()
    owner: Mapping[int, int] = field(default_factory=dict)
    buffers: Mapping[int, Buffer] = field(default_factory=dict)
    arena: int = 0
    donated: Mapping[int, int] = field(default_factory=dict)

    @property
    def first(self) -> tuple[int, ...]:
        """Where the first rank is, whose parts are never smaller than another's."""
        return (0,) * len(self.sizes)

    @cached_property
    def device(self) -> torch.device:
        """Where the arena lies: the device of the values, an accelerator if any."""
        found = {value.meta.device for value in self.values.values()}
        return max(found, key=lambda d: d.type != "cpu", default=torch.device("cpu"))

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
        lines += [f"{self._line(each)} once" for each in self.constants]
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
        if transfer.scratch:
            what += f" through {', '.join(map(str, transfer.scratch))}"
        labels = ", ".join(label for label in transfer.labels if label)
        return f"{'':<40} {what}, {moved} bytes{planned} # {labels}".rstrip(" #")


def bind(arguments: Any, coordinate: Sequence[int]) -> Any:
    """Arguments with every extent filled in for a rank."""
    return map_leaves(
        lambda leaf: leaf.at(coordinate) if isinstance(leaf, Extent) else leaf,
        arguments,
    )
