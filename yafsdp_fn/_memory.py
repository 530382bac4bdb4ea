"""Where values lie: an arena planned ahead from lifetimes.

Everything that an operator or a collective can write in place lies at a fixed offset of
one arena that is allocated once: gathered parameters, gradients, what the ranks send of
them, and activations. Two ranges that are alive together never overlap.

Offsets are given to the largest values first, each the lowest that is free while it
lives (greedy by size; Pisarchyk and Lee, arXiv:2001.03288).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from . import _rules
from ._graph import Ref
from ._groups import is_gather
from ._kernels import OVERWRITES, ROW_BY_ROW, updates, writer
from ._layout import Meta
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
from ._shapes import Shapes, is_direct, packed_bytes

KINDS = ("gathered", "gradients", "activations", "temporaries")
ALIGNMENT = 64  # bytes: a cache line, and the widest vector


def with_buffers(program: Program, donated: Mapping[int, int]) -> Program:
    """Plan the arena of a program.

    Args:
        program: A program whose values have no place yet.
        donated: For outputs the input whose memory they may be written into.
    """
    shapes = Shapes(program)
    owner = shapes.owners()
    lives = _Lives(program, owner, shapes)
    written = lives.written_into(donated)
    spans = lives.spans(written)
    placed = _offsets({n: (s.begin, s.end, s.nbytes) for n, s in spans.items()})
    buffers = {
        number: Buffer(placed[root], span.nbytes, lives.kinds[root])
        for number, span in lives.own.items()
        for root in (lives.root(number),)
    }
    arena = max((buffer.end for buffer in buffers.values()), default=0)
    return replace(program, owner=owner, buffers=buffers, arena=arena, donated=written)


# --- lifetimes ------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """The instructions between which memory is in use, both included."""

    begin: int
    end: int
    nbytes: int


class _Lives:
    """Lifetimes of the memory of a program."""

    def __init__(self, program: Program, owner: dict[int, int], shapes: Shapes) -> None:
        self.program, self.owner, self.shapes = program, owner, shapes
        self.joined: dict[int, int] = {}  # an owner in the memory of an operand's
        self.inputs = {ref.id for ref in program.inputs}
        self.kept = {owner[r.id] for r in program.outputs if r is not None}
        self.kept |= {owner[r.id] for each in program.constants for r in each.writes}
        self.touched: dict[int, list[int]] = defaultdict(list)
        self.made_by: dict[int, tuple[int, Instruction]] = {}
        for position, instruction in enumerate(program.instructions):
            for number in {owner[ref.id] for ref in _held(instruction)}:
                self.touched[number].append(position)
            for ref in begun(instruction):
                self.made_by.setdefault(owner[ref.id], (position, instruction))

    # --- donated memory ---

    def written_into(self, donated: Mapping[int, int]) -> dict[int, int]:
        """The outputs that can be written into the memory of an input."""
        found: dict[int, int] = {}
        outputs = [r.id for r in self.program.outputs if r is not None]
        for output, given in donated.items():
            once = sum(self.owner[n] == self.owner[output] for n in outputs) == 1
            if once and given not in self.kept and self._takes(output, given):
                found[output] = given
        return found

    def _takes(self, output: int, given: int) -> bool:
        """Whether an output may be written where an input lies."""
        if self.owner[output] != output or output not in self.made_by:
            return False
        position, maker = self.made_by[output]
        if not isinstance(maker, Compute) or not self.shapes.alike(output, given):
            return False
        last = max(self.touched[given], default=-1)
        if updates(maker.op):
            return last <= position and self._is_updated(maker, output, given)
        return (
            writer(maker.op) is not None
            and len(maker.writes) == 1
            and (last < position or (last == position and self._in_place(maker, given)))
        )

    def _is_updated(self, maker: Compute, output: int, given: int) -> bool:
        """Whether an output of a fused optimiser is what becomes of an operand."""
        slot = maker.outputs.index(Ref(output))
        operands = [leaf for row in maker.args[:5] for leaf in row]
        same = [n for n, ref in enumerate(operands) if self.owner[ref.id] == given]
        return operands[slot] == Ref(given) and same == [slot]

    # --- the arena ---

    def spans(self, written: Mapping[int, int]) -> dict[int, Span]:
        """Lifetimes in the arena, those that share memory as one."""
        self.written = written
        self.own = own = {
            number: self._span(number) for number in self.made_by if self._fits(number)
        }
        roots = dict(own)
        for number in sorted(own, key=lambda n: own[n].begin):
            other = self._operand_to_reuse(number)
            if other is not None:
                self.joined[number] = other
                root, span = self.root(other), roots.pop(number)
                roots[root] = replace(roots[root], end=max(roots[root].end, span.end))
        return roots

    def root(self, number: int) -> int:
        """The owner whose range an owner lies in."""
        while number in self.joined:
            number = self.joined[number]
        return number

    def _span(self, number: int) -> Span:
        position, _ = self.made_by[number]
        end = max(self.touched[number], default=position)
        return Span(position, end, _aligned(self._nbytes(number)))

    def _fits(self, number: int) -> bool:
        """Whether memory that an instruction makes can lie in the arena."""
        _, maker = self.made_by[number]
        if number in self.kept or number in self.inputs or number in self.written:
            return False
        if isinstance(maker, Start):
            transfer = maker.transfer
            scratch = Ref(number) in transfer.scratch
            return bool(transfer.cuts) and (scratch or self._direct(transfer, number))
        if not isinstance(maker, Compute) or writer(maker.op) is None:
            return False
        made = [ref.id for ref in maker.writes]
        whole = len(made) == len(maker.outputs)
        return whole and all(n == self.owner[n] and n not in self.kept for n in made)

    def _direct(self, transfer: Transfer, number: int) -> bool:
        item = transfer.targets.index(Ref(number))
        return is_direct(self.program.values[number].meta, transfer.cuts[item][0])

    def _nbytes(self, number: int) -> int:
        """Bytes of a value with what a collective pads it by, as operand or result."""
        local = self.program.values[number]
        needed = [local.nbytes(self.program.first)]
        for position in self.touched[number]:
            instruction = self.program.instructions[position]
            if isinstance(instruction, Start):
                needed.append(self._packed(instruction.transfer, number))
        return max(needed)

    def _packed(self, transfer: Transfer, number: int) -> int:
        """Bytes of a value that a collective reads or writes whole."""
        ranks = self.program.sizes[transfer.axis]
        for item, cut in enumerate(transfer.cuts):
            scratch = transfer.scratch[item : item + 1]
            whole = transfer.whole[item].id
            if number in (self.owner[whole], *(ref.id for ref in scratch)):
                return packed_bytes(self._local_meta(whole), cut, ranks)
        return 0

    def _local_meta(self, number: int) -> Meta:
        local = self.program.values[number]
        return replace(local.meta, shape=local.shape(self.program.first))

    # --- in place ---

    def _operand_to_reuse(self, number: int) -> int | None:
        """An operand that ends where a result of its form begins, to be overwritten."""
        position, maker = self.made_by[number]
        if not isinstance(maker, Compute):
            return None
        for ref in maker.reads:
            other = self.owner[ref.id]
            if (
                other in self.own
                and other != number
                and self.own[other].end == position
                and self.own[other].begin < position
                and self.own[other].nbytes == self.own[number].nbytes
                and self.shapes.alike(number, ref.id)
                and self._in_place(maker, other)
                and other not in self.joined.values()
            ):
                return other
        return None

    def _in_place(self, maker: Compute, number: int) -> bool:
        """Whether an operator may overwrite the memory of an operand."""
        reads = [r for r in maker.reads if self.owner[r.id] == number]
        if len(maker.writes) > 1 or not may_overwrite(self.program, maker, reads):
            return False
        (target,) = maker.writes
        return all(self.shapes.alike(target.id, ref.id) for ref in reads)

    # --- kinds ---

    @cached_property
    def _gathers(self) -> list[int]:
        """Where gathers are awaited: another group of parameters is used from there."""
        return [
            n
            for n, each in enumerate(self.program.instructions)
            if isinstance(each, Wait) and is_gather(each.transfer)
        ]

    @cached_property
    def _summed(self) -> set[int]:
        transfers = [t for t in self.program.transfers() if t.kind != "all_gather"]
        return {self.owner[ref.id] for t in transfers for ref in t.held}

    @cached_property
    def _whole(self) -> set[int]:
        """Gathered parameters, and what is repeated on them."""
        found = {
            self.owner[r.id]
            for t in self.program.transfers()
            if is_gather(t)
            for r in t.targets
        }
        for each in self.program.instructions:
            if isinstance(each, Compute) and each.replay:
                found |= {self.owner[ref.id] for ref in each.writes}
        return found

    @cached_property
    def kinds(self) -> dict[int, str]:
        """What memory is used for, by its root; what shares it counts as one."""
        found: dict[int, str] = {}
        for number in self.own:
            root = self.root(number)
            kinds = (self._kind(number), found.get(root, KINDS[-1]))
            found[root] = min(kinds, key=KINDS.index)
        return found

    def _kind(self, number: int) -> str:
        if number in self._whole:
            return "gathered"
        if number in self._summed:
            return "gradients"
        span = self.own[number]
        passed = any(span.begin < n < span.end for n in self._gathers)
        return "activations" if passed else "temporaries"


def _held(instruction: Instruction) -> tuple[Ref, ...]:
    """The values whose memory an instruction needs."""
    if isinstance(instruction, Free):
        return ()
    if isinstance(instruction, Start | Wait):
        return instruction.transfer.held
    return (*instruction.reads, *instruction.writes)


def may_overwrite(
    program: Program, instruction: Compute, operands: Sequence[Ref]
) -> bool:
    """Whether an operator's result may lie where these operands do.

    It may if it works element by element, edits its first operand, or works row by row
    and reads of its first operand no row after it has written it.
    """
    args = instruction.args
    if instruction.op in OVERWRITES:
        return list(operands) == [args[0]]
    if instruction.op in ROW_BY_ROW:
        dim = args[ROW_BY_ROW[instruction.op]]
        dims = max(1, len(program.values[args[0].id].meta.shape))
        return list(operands) == [args[0]] and dim % dims == dims - 1
    return _rules.is_elementwise(instruction.op)


# --- offsets --------------------------------------------------------------------------


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _offsets(spans: Mapping[int, tuple[int, int, int]]) -> dict[int, int]:
    """Give every span `(begin, end, nbytes)` an offset, the largest spans first."""
    count = len(spans)
    rows = torch.zeros((4, count), dtype=torch.int64)  # begin, end, offset, offset end
    offsets: dict[int, int] = {}
    order = sorted(spans, key=lambda n: (-spans[n][2], spans[n][0], n))
    for placed, number in enumerate(order):
        begin, end, nbytes = spans[number]
        known = rows[:, :placed]
        alive = known[:, (known[0] <= end) & (known[1] >= begin)]
        offset = _lowest(alive[2:].t().tolist(), nbytes)
        offsets[number] = offset
        rows[:, placed] = torch.tensor([begin, end, offset, offset + nbytes])
    return offsets


def _lowest(taken: list[list[int]], nbytes: int) -> int:
    """The begin of the smallest gap that is large enough, else the end of all."""
    best, gap, reached = -1, -1, 0
    for begin, end in sorted(taken):
        free = begin - reached
        if free >= nbytes and (gap < 0 or free < gap):
            best, gap = reached, free
        reached = max(reached, end)
    return best if best >= 0 else reached
