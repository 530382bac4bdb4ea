"""run and emulate: the two interpreters that compute.

Both bind a program to coordinates and execute the same list; they differ in what a
transfer is: asynchronous collectives between processes, or an exchange between ranks
that all live here.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ._arena import POOL
from ._bind import Action, Rank, nothing
from ._collectives import Exchange, exchange
from ._program import Program, Start, Transfer, Wait
from ._shared import Neighbours, join

# --- between processes ----------------------------------------------------------------


class Runner:
    """A program bound to this process: executed over `torch.distributed`.

    Args:
        program: The program.
        coordinate: Where this process is on the mesh.
        groups: The process group along each axis.
    """

    def __init__(
        self,
        program: Program,
        coordinate: Sequence[int],
        groups: Sequence[dist.ProcessGroup | None],
    ) -> None:
        self.program = program
        self.coordinate = coordinate
        self.groups = groups
        self.near: list[Neighbours | None] | None = None  # along each axis
        self.rank: Rank | None = None
        self.each: list[Action | None] = []  # by instruction
        self.actions: list[Action] = []
        self.verified = False

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        with self._running(inputs) as rank:
            if self.verified:
                for action in self.actions:
                    action()
            else:
                self._verify(rank)
            return rank.results()

    def part(self, inputs: Sequence[torch.Tensor], communication: bool) -> None:
        """Do the transfers alone, or all but them, to measure what they take.

        Values that were not made are zeros, or what lies where they go.
        """
        with self._running(inputs) as rank:
            pairs = zip(self.program.instructions, self.each, strict=True)
            for instruction, action in pairs:
                transfer = isinstance(instruction, Start | Wait)
                if transfer == communication and action is not None:
                    rank.fill(instruction.reads)
                    action()

    @contextmanager
    def _running(self, inputs: Sequence[torch.Tensor]) -> Iterator[Rank]:
        with POOL.running(), torch.no_grad():
            rank = self._bound()
            rank.begin(inputs)
            for near in filter(None, self.near or ()):
                near.begin(rank.arena)
            try:
                yield rank
            finally:
                rank.clear()

    def forget(self) -> None:
        """Drop what lies in the arena, which has been replaced."""
        self.rank, self.each, self.actions = None, [], []
        for near in filter(None, self.near or ()):
            near.arenas.clear()  # the others have replaced theirs too

    def _bound(self) -> Rank:
        program = self.program
        if self.near is None:
            self.near = self._neighbours()
        shared = any(near is not None for near in self.near)
        arena = POOL.block(self, program.device, 0, program.arena, shared)
        if self.rank is None:
            self.rank = Rank(program, self.coordinate, arena)
            self.each = self._actions(self.rank)
            self.actions = [a for a in self.each if a and a is not nothing]
        return self.rank

    def _neighbours(self) -> list[Neighbours | None]:
        """For each axis its ranks, if all are on this host."""
        counts = Counter[int]()
        for transfer in self.program.transfers():
            counts[transfer.axis] += len(transfer.sources)
        return [
            None if group is None else join(group, counts[axis])
            for axis, group in enumerate(self.groups)
        ]

    def _actions(self, rank: Rank) -> list[Action | None]:
        exchanges: dict[int, Exchange] = {}
        items, near = Counter[int](), self.near or [None] * len(self.groups)
        found: list[Action | None] = []
        for instruction in self.program.instructions:
            if isinstance(instruction, Start):
                axis = instruction.transfer.axis
                group, number = self.groups[axis], items[axis]
                assert group is not None
                made = Exchange(rank, instruction.transfer, group, number, near[axis])
                items[axis] += len(instruction.transfer.sources)
                exchanges[id(instruction.transfer)] = made
                found.append(made.start)
            elif isinstance(instruction, Wait):
                found.append(exchanges[id(instruction.transfer)].wait)
            else:
                found.append(rank.action(instruction))
        return found

    def _verify(self, rank: Rank) -> None:
        """The first execution checks every value."""
        pairs = zip(self.program.instructions, self.each, strict=True)
        for instruction, action in pairs:
            rank.first(instruction, action)
        self.verified = True


# --- all ranks in one process ---------------------------------------------------------


class Emulator:
    """A program bound to all coordinates of a mesh, executed in lockstep.

    Args:
        program: The program.
        coordinates: The coordinates of all ranks.
    """

    def __init__(
        self, program: Program, coordinates: Sequence[tuple[int, ...]]
    ) -> None:
        self.program = program
        self.coordinates = list(coordinates)
        self.ranks: list[Rank] = []
        self.actions: list[list[Action | None]] = []
        self.verified = False

    def __call__(
        self, inputs: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[torch.Tensor] | None]:
        """Execute on the inputs of every rank; the results of every rank."""
        with POOL.running(), torch.no_grad():
            self._bind()
            for n, rank in enumerate(self.ranks):
                rank.begin([parts[n] for parts in inputs])
            try:
                pairs = zip(self.program.instructions, self.actions, strict=True)
                for instruction, actions in pairs:
                    self._step(instruction, actions)
                self.verified = True
                results = [rank.results() for rank in self.ranks]
            finally:
                for rank in self.ranks:
                    rank.clear()
        columns = zip(*results, strict=True)
        return [_present(column) for column in columns]

    def forget(self) -> None:
        """Drop what lies in an arena that has been replaced."""
        self.ranks, self.actions = [], []

    def _bind(self) -> None:
        program, count = self.program, range(len(self.coordinates))
        blocks = [POOL.block(self, program.device, n, program.arena) for n in count]
        if not self.ranks:
            pairs = zip(self.coordinates, blocks, strict=True)
            self.ranks = [Rank(program, at, block) for at, block in pairs]
            self.actions = [
                [rank.action(i) for rank in self.ranks] for i in program.instructions
            ]

    def _step(self, instruction: Any, actions: Sequence[Action | None]) -> None:
        if isinstance(instruction, Wait):
            for item in range(len(instruction.transfer.sources)):
                self._exchange(instruction.transfer, item)
        for rank, action in zip(self.ranks, actions, strict=True):
            if not self.verified:
                rank.first(instruction, action)
            elif action is not None:
                action()

    def _exchange(self, transfer: Transfer, item: int) -> None:
        source, target = transfer.sources[item].id, transfer.targets[item].id
        local = self.program.values[target]
        for members in self._rows(transfer.axis).values():
            ranks = [self.ranks[n] for n in members]
            dim = transfer.cuts[item][0] if transfer.cuts else None
            shapes = [local.shape(rank.coordinate) for rank in ranks]
            made = exchange(
                transfer,
                item,
                [rank.values[source] for rank in ranks],
                [0 if dim is None else shape[dim] for shape in shapes],
            )
            for rank, value in zip(ranks, made, strict=True):
                rank.put(target, value)

    def _rows(self, axis: int) -> Mapping[tuple[int, ...], list[int]]:
        """Ranks that differ in nothing but their place on an axis."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(self.coordinates):
            rest = (*coordinate[:axis], *coordinate[axis + 1 :])
            rows.setdefault(rest, []).append(rank)
        return rows


def _present(column: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
    """A result of every rank, or None for a static one."""
    tensors = [tensor for tensor in column if tensor is not None]
    return tensors or None
