"""A program bound to a rank: every instruction as a function without arguments.

What lies in the arena lies there in every run, so its tensors are made once, and so are
all views of them: in a run, a view costs nothing, and an operator on such tensors is
called with arguments that are ready.
"""

import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

from ._errors import ProgramError
from ._graph import Ref, filled, results
from ._kernels import update, updates, writer
from ._layout import interval
from ._placed import Slice
from ._program import Adjust, Compute, Free, Program, bind
from ._shapes import dense_stride, in_order
from ._torch import storage_id

Environment = MutableMapping[int, torch.Tensor]
Action = Callable[[], None]

# --- one operator ---------------------------------------------------------------------


def compute(
    instruction: Compute, coordinate: Sequence[int]
) -> Callable[[Environment], None]:
    """A compute instruction as a function of the values of a rank."""
    call = caller(instruction, coordinate)
    targets = [None if ref is None else ref.id for ref in instruction.outputs]

    def action(values: Environment) -> None:
        _store(values, targets, call(values, instruction.op))

    return action


def caller(instruction: Compute, coordinate: Sequence[int]) -> Callable[..., Any]:
    """A function of values and an operator, called with the instruction's arguments."""
    args, kwargs = bind((list(instruction.args), dict(instruction.kwargs)), coordinate)
    slots = [(n, arg.id) for n, arg in enumerate(args) if isinstance(arg, Ref)]
    if len(slots) < len(instruction.reads):  # tensors in lists or keyword arguments
        return lambda values, op: op(*filled(args, values), **filled(kwargs, values))

    def call(values: Environment, op: Any) -> Any:
        given = list(args)
        for position, number in slots:
            given[position] = values[number]
        return op(*given, **kwargs)

    return call


def _store(values: Environment, targets: Sequence[int | None], out: Any) -> None:
    made = (out,) if isinstance(out, torch.Tensor) else results(out)
    for target, tensor in zip(targets, made, strict=True):
        if target is not None:
            values[target] = tensor


# --- a rank ---------------------------------------------------------------------------


class Rank:
    """The values of one rank, and its instructions as functions on them.

    Attributes:
        program: The program.
        coordinate: Where the rank is on the mesh.
        arena: The block of bytes that buffers lie in.
        values: The tensors, by the number of the value.
        fixed: The numbers of those that are the same tensors in every run.
    """

    def __init__(
        self, program: Program, coordinate: Sequence[int], arena: torch.Tensor
    ) -> None:
        self.program, self.coordinate, self.arena = program, coordinate, arena
        self.values: dict[int, torch.Tensor] = {}
        self.fixed: set[int] = set()
        for number in program.buffers:
            self.values[number] = self._in_arena(number)
        with torch.no_grad():
            for each in program.constants:
                self._once(each)
        self.fixed.update(self.values)

    def _once(self, instruction: Compute | Adjust) -> None:
        if isinstance(instruction, Compute):
            compute(instruction, self.coordinate)(self.values)
        else:
            self._adjusted(instruction)()

    def _in_arena(self, number: int) -> torch.Tensor:
        local = self.program.values[number]
        shape = local.shape(self.coordinate)
        return self.view(number, local.meta.dtype).as_strided(
            shape, dense_stride(shape, local.meta.stride)
        )

    def view(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """The whole buffer of an owner, as elements."""
        buffer = self.program.buffers[number]
        # Padding for alignment is no whole number of elements of every dtype.
        nbytes = buffer.nbytes // dtype.itemsize * dtype.itemsize
        return self.arena[buffer.offset : buffer.offset + nbytes].view(dtype)

    # --- actions ---

    def action(self, instruction: Any) -> Action | None:
        """What a rank does by itself in a run; None if there is nothing to do."""
        if isinstance(instruction, Compute):
            return self._view(instruction) or self._computed(instruction)
        if isinstance(instruction, Adjust):
            return self._adjusted(instruction)
        if isinstance(instruction, Free):
            return self._freed(instruction)
        return None

    def _view(self, instruction: Compute) -> Action | None:
        """A view of fixed tensors is made now, and nothing is left to do."""
        read = [ref.id for ref in instruction.reads]
        made, owner = [ref.id for ref in instruction.writes], self.program.owner
        if not read or not self.fixed.issuperset(read):
            return None
        if any(owner[number] != owner[read[0]] for number in made):
            return None
        views = {number: self.values[number] for number in read}
        compute(instruction, self.coordinate)(views)
        base = storage_id(self.values[read[0]])
        if any(storage_id(views[number]) != base for number in made):
            return None  # this rank's part must be copied
        self.values.update((number, views[number]) for number in made)
        self.fixed.update(made)
        return nothing

    def _computed(self, instruction: Compute) -> Action:
        if updates(instruction.op):
            return self._updated(instruction)
        places = self._places(instruction)
        write = writer(instruction.op)
        if places is None or write is None:
            return self._allocated(instruction)
        if {r.id for r in instruction.reads} | set(places) <= self.fixed:
            args, kwargs = bind((instruction.args, instruction.kwargs), self.coordinate)
            outs = [self.values[n] for n in places]
            given, named = filled((args, kwargs), self.values)
            return functools.partial(write, outs, *given, **named)
        return self._written(instruction, write, places)

    def _allocated(self, instruction: Compute) -> Action:
        """An operator that makes its results; one that hands on an operand copies it.

        Who reads the program takes what is no view for memory of its own.
        """
        action, owner = compute(instruction, self.coordinate), self.program.owner
        own = [r.id for r in instruction.writes if owner.get(r.id, r.id) == r.id]
        read, values = [r.id for r in instruction.reads], self.values

        def run() -> None:
            held = {storage_id(values[n]) for n in read}
            action(values)
            for number in own:
                if storage_id(values[number]) in held:
                    values[number] = values[number].clone()

        return run if own and read else functools.partial(action, values)

    def _written(
        self, instruction: Compute, write: Callable[..., Any], places: Sequence[int]
    ) -> Action:
        call = caller(instruction, self.coordinate)
        targets = [r.id for r in instruction.writes]

        def action() -> None:
            outs = [self.values[n] for n in places]
            call(self.values, functools.partial(write, outs))
            self.values.update(zip(targets, outs, strict=True))

        return action

    def _places(self, instruction: Compute) -> list[int] | None:
        """The values whose memory the results go to, if all have a place."""
        buffers, donated = self.program.buffers, self.program.donated
        if len(instruction.writes) < len(instruction.outputs):
            return None
        found = [donated.get(ref.id, ref.id) for ref in instruction.writes]
        rows = zip(instruction.writes, found, strict=True)
        return found if all(r.id in buffers or n != r.id for r, n in rows) else None

    def _updated(self, instruction: Compute) -> Action:
        """A fused optimiser: in place where memory is donated."""
        call = caller(instruction, self.coordinate)
        donated = self.program.donated
        targets = [None if r is None else r.id for r in instruction.outputs]
        given = [r is not None and r.id in donated for r in instruction.outputs]
        count = len(instruction.args[1])
        own = any(instruction.outputs[count : 2 * count])  # None if nobody reads them

        def op(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
            return update(instruction.op, args, kwargs, given, own)

        def action() -> None:
            _store(self.values, targets, call(self.values, op))

        return action

    def _adjusted(self, instruction: Adjust) -> Action:
        source, target = instruction.source.id, instruction.target.id
        move = instruction.move
        if isinstance(move, Slice):
            begin, length = self._part(instruction)

            def cut() -> None:
                self.values[target] = self.values[source].narrow(
                    move.dim, begin, length
                )

            if source in self.fixed:
                cut()
                self.fixed.add(target)
                return nothing
            return cut
        keeps = self.coordinate[move.axis] == 0

        def keep() -> None:
            whole = self.values[source]
            self.values[target] = whole if keeps else torch.zeros_like(whole)

        return keep

    def _part(self, instruction: Adjust) -> tuple[int, int]:
        move, values = instruction.move, self.program.values
        assert isinstance(move, Slice)
        value = values[instruction.target.id]
        size, before = value.meta.shape[move.dim], values[instruction.source.id]
        first, _ = interval(size, move.dim, before.placements, self.coordinate)
        begin, end = interval(size, move.dim, value.placements, self.coordinate)
        return begin - first, end - begin

    def _freed(self, instruction: Free) -> Action | None:
        numbers = [ref.id for ref in instruction.values if ref.id not in self.fixed]
        pop = self.values.pop
        if not numbers:
            return None

        def action() -> None:
            for number in numbers:
                pop(number, None)

        return action

    # --- the first run ---

    def first(self, instruction: Any, action: Action | None) -> None:
        """Do an instruction and compare what it made with what the program says of it.

        Raises:
            ProgramError: A shape or dtype differs, so a sharding rule is wrong.
        """
        if (
            isinstance(instruction, Compute)
            and action is not None
            and action is not nothing
        ):
            if updates(instruction.op) or self._places(instruction) is None:
                action()
            else:
                self._computed_apart(instruction)
        elif action is not None:
            action()
        self.verify(instruction)

    def _computed_apart(self, instruction: Compute) -> None:
        """Compute into new memory, so that a wrong shape overwrites nothing."""
        made: dict[int, torch.Tensor] = {}
        out = caller(instruction, self.coordinate)(self.values, instruction.op)
        _store(made, [None if r is None else r.id for r in instruction.outputs], out)
        places = self._places(instruction) or []
        for (number, tensor), place in zip(made.items(), places, strict=True):
            self._verify(instruction, number, tensor)
            self.values[number] = self.values[place].copy_(tensor)

    def verify(self, instruction: Any) -> None:
        """Compare the values that an instruction has written with their description."""
        for ref in instruction.writes:
            self._verify(instruction, ref.id, self.values[ref.id])

    def _verify(self, instruction: Any, number: int, found: torch.Tensor) -> None:
        wanted = self.program.values[number]
        shape = wanted.shape(self.coordinate)
        if tuple(found.shape) != shape or found.dtype != wanted.meta.dtype:
            raise ProgramError(
                f"{self.program._line(instruction)}\nmade {found.dtype}"
                f"{tuple(found.shape)} on the rank at {tuple(self.coordinate)}, which "
                f"should be {wanted.meta.dtype}{shape}. Please report this."
            )

    # --- a run ---

    def begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Take the inputs of a run."""
        pairs = zip(self.program.inputs, inputs, strict=True)
        self.values.update((ref.id, tensor) for ref, tensor in pairs)

    def fill(self, refs: Sequence[Ref]) -> None:
        """Make zeros of the values that are not there."""
        for ref in refs:
            if ref.id not in self.values:
                local = self.program.values[ref.id]
                self.values[ref.id] = torch.zeros(
                    local.shape(self.coordinate),
                    dtype=local.meta.dtype,
                    device=local.meta.device,
                )

    def put(self, number: int, made: torch.Tensor) -> None:
        """Take what a transfer has left in memory of its own."""
        if number in self.fixed:
            self.values[number].copy_(made)
        else:
            self.values[number] = in_order(
                made, self.program.values[number].meta.stride
            )

    def results(self) -> list[torch.Tensor | None]:
        """Hand out the results."""
        return [None if r is None else self.values[r.id] for r in self.program.outputs]

    def clear(self) -> None:
        """Keep nothing of a run that is not fixed."""
        for number in [n for n in self.values if n not in self.fixed]:
            del self.values[number]


def nothing() -> None:
    """What is left to do of a view."""
