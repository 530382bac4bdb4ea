"""run and emulate: the two interpreters that compute.

Both bind a program to coordinates and execute the same list; they differ in what a
transfer is: asynchronous collectives between processes, or an exchange between ranks
that all live here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ._collectives import exchange, in_order, start
from ._errors import ProgramError
from ._graph import Ref, map_leaves, results
from ._layout import interval
from ._placed import Slice
from ._program import Adjust, Compute, Free, Program, Start, Transfer, Wait, bind

Environment = dict[int, torch.Tensor]
Action = Callable[[Environment], None]

# --- computing on one rank ------------------------------------------------------------


def compute(instruction: Compute, coordinate: Sequence[int]) -> Action:
    """A compute instruction as a function of the environment of a rank."""
    args, kwargs = bind((list(instruction.args), dict(instruction.kwargs)), coordinate)
    op, outputs = instruction.op, instruction.outputs
    slots = [(n, arg.id) for n, arg in enumerate(args) if isinstance(arg, Ref)]
    if len(slots) < len(instruction.reads):
        return _nested(op, args, kwargs, outputs)
    targets = [None if ref is None else ref.id for ref in outputs]

    def action(values: Environment) -> None:
        filled = list(args)
        for position, number in slots:
            filled[position] = values[number]
        _store(values, targets, op(*filled, **kwargs))

    return action


def _nested(op: Any, args: Any, kwargs: Any, outputs: Sequence[Ref | None]) -> Action:
    """The same for tensors inside of lists or keyword arguments."""
    targets = [None if ref is None else ref.id for ref in outputs]

    def action(values: Environment) -> None:
        filled, named = map_leaves(
            lambda leaf: values[leaf.id] if isinstance(leaf, Ref) else leaf,
            (args, kwargs),
        )
        _store(values, targets, op(*filled, **named))

    return action


def _store(values: Environment, targets: Sequence[int | None], out: Any) -> None:
    made = (out,) if isinstance(out, torch.Tensor) else results(out)
    for target, tensor in zip(targets, made, strict=True):
        if target is not None:
            values[target] = tensor


def adjust(program: Program, instruction: Adjust, coordinate: Sequence[int]) -> Action:
    """A cut that moves nothing, as a function of the environment of a rank."""
    move, source, target = (
        instruction.move,
        instruction.source.id,
        instruction.target.id,
    )
    if isinstance(move, Slice):
        value = program.values[target]
        size = value.meta.shape[move.dim]
        before = program.values[source].placements
        first, _ = interval(size, move.dim, before, coordinate)
        begin, end = interval(size, move.dim, value.placements, coordinate)

        def cut(values: Environment) -> None:
            whole = values[source]
            values[target] = whole.narrow(move.dim, begin - first, end - begin)

        return cut
    keeps = coordinate[move.axis] == 0

    def keep(values: Environment) -> None:
        whole = values[source]
        values[target] = whole if keeps else torch.zeros_like(whole)

    return keep


def free(instruction: Free) -> Action:
    """Drop values, so that their memory can be used again."""
    numbers = [ref.id for ref in instruction.values]

    def action(values: Environment) -> None:
        for number in numbers:
            del values[number]

    return action


def local_action(
    program: Program, instruction: Any, coordinate: Sequence[int]
) -> Action | None:
    """What one rank does by itself, or None for a transfer."""
    if isinstance(instruction, Compute):
        return compute(instruction, coordinate)
    if isinstance(instruction, Adjust):
        return adjust(program, instruction, coordinate)
    return free(instruction) if isinstance(instruction, Free) else None


def verify(
    program: Program, instruction: Any, values: Environment, coordinate: Sequence[int]
) -> None:
    """Compare what an instruction made with what the program says of it.

    Raises:
        ProgramError: A shape or dtype differs, so a sharding rule is wrong.
    """
    for ref in instruction.writes:
        found, wanted = values[ref.id], program.values[ref.id]
        if tuple(found.shape) != wanted.shape(coordinate) or (
            found.dtype != wanted.meta.dtype
        ):
            raise ProgramError(
                f"{program._line(instruction)}\nmade {found.dtype}{tuple(found.shape)} "
                f"on the rank at {tuple(coordinate)}, which should be "
                f"{wanted.meta.dtype}{wanted.shape(coordinate)}. Please report this."
            )


def _length(
    program: Program, transfer: Transfer, item: int, coordinate: Sequence[int]
) -> int:
    if not transfer.cuts:
        return 0
    shape = program.values[transfer.targets[item].id].shape(coordinate)
    return shape[transfer.cuts[item][0]]


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
        self.finishing: dict[Ref, list[Callable[[], torch.Tensor]]] = {}
        self.actions = [self._action(i) for i in program.instructions]
        self.verified = False

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        values = {r.id: t for r, t in zip(self.program.inputs, inputs, strict=True)}
        with torch.no_grad():
            if self.verified:
                for action in self.actions:
                    action(values)
            else:
                self._verify(values)
        return [None if r is None else values[r.id] for r in self.program.outputs]

    def _verify(self, values: Environment) -> None:
        """The first execution checks every value."""
        pairs = zip(self.program.instructions, self.actions, strict=True)
        for instruction, action in pairs:
            action(values)
            verify(self.program, instruction, values, self.coordinate)
        self.verified = True

    def _action(self, instruction: Any) -> Action:
        if isinstance(instruction, Start):
            return self._start(instruction.transfer)
        if isinstance(instruction, Wait):
            return self._wait(instruction.transfer)
        action = local_action(self.program, instruction, self.coordinate)
        assert action is not None
        return action

    def _start(self, transfer: Transfer) -> Action:
        group = self.groups[transfer.axis]
        assert group is not None
        lengths = [
            _length(self.program, transfer, n, self.coordinate)
            for n in range(len(transfer.sources))
        ]

        def action(values: Environment) -> None:
            self.finishing[transfer.targets[0]] = [
                start(transfer, n, values[ref.id], lengths[n], group)
                for n, ref in enumerate(transfer.sources)
            ]

        return action

    def _wait(self, transfer: Transfer) -> Action:
        def action(values: Environment) -> None:
            finishing = self.finishing.pop(transfer.targets[0])
            for ref, finish in zip(transfer.targets, finishing, strict=True):
                stride = self.program.values[ref.id].meta.stride
                values[ref.id] = in_order(finish(), stride)

        return action


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
        self.actions = [
            [local_action(program, i, c) for c in self.coordinates]
            for i in program.instructions
        ]
        self.verified = False

    def __call__(
        self, inputs: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[torch.Tensor] | None]:
        """Execute on the inputs of every rank; the results of every rank."""
        worlds: list[Environment] = [
            {r.id: t[n] for r, t in zip(self.program.inputs, inputs, strict=True)}
            for n in range(len(self.coordinates))
        ]
        with torch.no_grad():
            for instruction, actions in zip(
                self.program.instructions, self.actions, strict=True
            ):
                self._step(instruction, actions, worlds)
        self.verified = True
        return [
            None if r is None else [values[r.id] for values in worlds]
            for r in self.program.outputs
        ]

    def _step(
        self,
        instruction: Any,
        actions: Sequence[Action | None],
        worlds: list[Environment],
    ) -> None:
        if isinstance(instruction, Wait):
            for item in range(len(instruction.transfer.sources)):
                self._exchange(instruction.transfer, item, worlds)
        for action, values in zip(actions, worlds, strict=True):
            if action is not None:
                action(values)
        if not self.verified:
            for coordinate, values in zip(self.coordinates, worlds, strict=True):
                verify(self.program, instruction, values, coordinate)

    def _exchange(
        self, transfer: Transfer, item: int, worlds: list[Environment]
    ) -> None:
        source, target = transfer.sources[item].id, transfer.targets[item].id
        stride = self.program.values[target].meta.stride
        for members in self._rows(transfer.axis).values():
            exchanged = exchange(
                transfer,
                item,
                [worlds[rank][source] for rank in members],
                [
                    _length(self.program, transfer, item, self.coordinates[rank])
                    for rank in members
                ],
            )
            for rank, value in zip(members, exchanged, strict=True):
                worlds[rank][target] = in_order(value, stride)

    def _rows(self, axis: int) -> Mapping[tuple[int, ...], list[int]]:
        """Ranks that differ in nothing but their place on an axis."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(self.coordinates):
            rest = (*coordinate[:axis], *coordinate[axis + 1 :])
            rows.setdefault(rest, []).append(rank)
        return rows
