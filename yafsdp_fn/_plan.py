"""plan: when gathers and reductions start, when they are awaited, what is kept.

A step is a sequence of events: the stretches of its operators between which the groups
of gathered parameters that they use change. Which groups stay from event to event is
paging with a known future; a gather starts some events before the one that needs it,
as soon as there is room; a reduction starts when its operand is ready. So communication
runs under the compute of other groups, in few buffers.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._buckets import Buckets, joined
from ._graph import Ref
from ._groups import Groups, is_gather, layer_of
from ._lower import Local as Step
from ._lower import renamed
from ._memory import with_buffers
from ._paging import Stay, begins, least_memory, stays
from ._placed import Placed
from ._program import (
    Free,
    Instruction,
    Local,
    Program,
    Start,
    Transfer,
    Wait,
)
from ._regions import regions
from ._schedule import Schedule
from ._simplify import simplify


def plan(
    placed: Placed,
    steps: Sequence[Step],
    axes: Sequence[str],
    schedule: Schedule,
    donated: Mapping[int, int],
    receives: bool = True,
) -> Program:
    """Schedule the graph of a rank.

    Args:
        placed: The placed graph, for what is known of its values.
        steps: The rank's graph.
        axes: Names of the mesh axes.
        schedule: The knobs.
        donated: Positions of outputs that may be written into the memory of an input,
            with the position of the input.
        receives: Whether a reduce-scatter needs memory for what it receives.

    Returns:
        The program.

    Raises:
        ArgumentError: `schedule.gather_memory` is less than one operator needs, or
            what `schedule.compile` needs is not installed.
    """
    values = {
        number: Local(value.meta, value.placements, value.label)
        for number, value in placed.values.items()
    }
    inputs = tuple(value.ref for value in placed.inputs)
    outputs = tuple(None if v is None else v.ref for v in placed.outputs)
    returned = frozenset(r.id for r in outputs if r is not None)
    once, repeated = simplify(steps, values, returned)
    group_by = schedule.group_by or layer_of
    groups = Groups(repeated, values, returned, placed.sizes, group_by)
    planner = _Planner(groups, schedule, values, receives, len(placed.sizes))
    instructions = planner.run()
    kept = {r for each in once for r in each.writes}
    kept |= {r for r in (*inputs, *outputs) if r is not None}
    if schedule.compile:
        backend = "inductor" if schedule.compile is True else schedule.compile
        instructions = regions(
            instructions, planner.values, placed.sizes, kept, backend
        )
    program = Program(
        tuple(axes),
        placed.sizes,
        planner.values,
        inputs,
        outputs,
        _with_releases(instructions, kept),
        tuple(once),
    )
    pairs = ((outputs[o], inputs[i]) for o, i in donated.items())
    return with_buffers(program, {o.id: i.id for o, i in pairs if o is not None})


@dataclass
class _Event:
    """Operators that use the same groups."""

    groups: frozenset[int]
    members: set[int] = field(default_factory=set)  # what they use, of all groups


@dataclass
class _Planner:
    groups: Groups
    schedule: Schedule
    values: dict[int, Local]
    receives: bool
    axes: int

    def __post_init__(self) -> None:
        groups = self.groups
        self.fresh = itertools.count(max(self.values, default=0) + 1)
        self.names: dict[tuple[int, int], Ref] = {}  # by value and stay
        self.named: set[Ref] = set()
        self.made: set[tuple[int, int]] = set()  # members, by position and stay
        self.waiting: dict[int, list[Transfer]] = {}  # started gathers, by stay
        self.event_of = self._events()
        self.stays, self.begin_at = self._stays()
        self.stay_of: dict[tuple[int, int], int] = {}  # by group and event
        for number, stay in enumerate(self.stays):
            for event in range(stay.first, stay.last + 1):
                self.stay_of[stay.group, event] = number
        # One buffer of gradients is in flight while another one is filled.
        room = max(groups.sizes.values(), default=math.inf)
        full = room / _PARTS if groups.sizes else 0
        self.buckets = Buckets(self._nbytes, self._scratch, full, room)

    # --- events ---

    def _events(self) -> dict[int, int]:
        """The event of every step of the program itself."""
        self.events = [_Event(frozenset())]  # what comes before the first group
        found: dict[int, int] = {}
        for position, step in enumerate(self.groups.steps):
            if position in self.groups.members or position in self.groups.feeders:
                continue
            used = {m for ref in step.reads for m in self.groups.needed(ref)}
            paged = frozenset(self.groups.number[m] for m in used) - self.groups.small
            if paged and self.events[-1].groups != paged:
                self.events.append(_Event(paged))
            self.events[-1].members |= used
            found[position] = len(self.events) - 1
        return found

    def _stays(self) -> tuple[list[Stay], dict[int, list[int]]]:
        """When groups are in memory, and the stays that begin at every event."""
        uses = [event.groups for event in self.events]
        sizes, ahead = self.groups.sizes, self.schedule.prefetch
        memory = self.schedule.gather_memory
        if memory is None:
            memory = least_memory(uses, sizes, ahead)
        found = stays(uses, sizes, memory, ahead)
        starts = begins(found, uses, sizes, memory, ahead)
        for group in sorted(self.groups.small):
            at = [n for n, e in enumerate(self.events) if self._used(e, group)]
            found.append(Stay(group, at[0], at[-1]))
            starts.append(max(0, at[0] - ahead))
        begin_at: dict[int, list[int]] = defaultdict(list)
        for number in sorted(range(len(found)), key=lambda n: found[n].first):
            begin_at[starts[number]].append(number)
        return found, begin_at

    def _used(self, event: _Event, group: int) -> list[int]:
        return sorted(m for m in event.members if self.groups.number[m] == group)

    # --- the program ---

    def run(self) -> list[Instruction]:
        scheduled, current = self.begin(0, 0), 0
        for position, event in self.event_of.items():
            for passed in range(current + 1, event + 1):
                scheduled += self.begin(passed, position)
            current = event
            scheduled += self.step(position, event)
        return [*scheduled, *self.buckets.finish()]

    def begin(self, event: int, position: int) -> list[Instruction]:
        """Start gathers, and reductions of the event before."""
        issued: list[Instruction] = []
        for stay in self.begin_at.get(event, ()):
            if all(self.groups.ready[m] < position for m in self.gathers(stay)):
                issued += self.gather(stay)
        return [*issued, *self.buckets.start_all()]

    def step(self, position: int, event: int) -> list[Instruction]:
        step = self.groups.steps[position]
        issued = self.make_all(step, event)
        renamed = self.renamed(step, event)
        if isinstance(renamed, Transfer):
            return [*issued, *self.buckets.add(renamed)]
        return [*issued, *self.buckets.need(step.reads), renamed]

    # --- gathers ---

    def gathers(self, stay: int) -> list[int]:
        """The gathers of a stay that can be started ahead."""
        found = self.stays[stay]
        events = self.events[found.first : found.last + 1]
        used = (self._used(event, found.group) for event in events)
        wanted = sorted({m for members in used for m in members})
        return [
            m
            for m in wanted
            if is_gather(self.groups.steps[m])
            and not any(b in self.groups.members for b in self.groups.behind(m))
        ]

    def gather(self, stay: int) -> list[Instruction]:
        """Start the gathers of a stay: one transfer for every mesh axis."""
        issued: list[Instruction] = []
        transfers: dict[int, list[Transfer]] = defaultdict(list)
        for member in self.gathers(stay):
            if (member, stay) not in self.made:
                self.made.add((member, stay))
                issued += self.feed(member, stay)
                transfer = self.renamed_for(self.groups.steps[member], stay)
                assert isinstance(transfer, Transfer)
                issued += self.buckets.need(transfer.sources)
                transfers[transfer.axis].append(transfer)
        whole = [joined(each) for each in transfers.values()]
        self.waiting.setdefault(stay, []).extend(whole)
        return [*issued, *(Start(transfer) for transfer in whole)]

    def feed(self, member: int, stay: int) -> list[Instruction]:
        """What is computed on shards before they are gathered."""
        issued: list[Instruction] = []
        for feeder in self.groups.behind(member):
            if feeder in self.groups.feeders and (feeder, stay) not in self.made:
                self.made.add((feeder, stay))
                issued += self.feed(feeder, stay)
                issued.append(self.renamed_for(self.groups.steps[feeder], stay))
        return issued

    def make_all(self, step: Step, event: int) -> list[Instruction]:
        """Make the gathered values that a step reads."""
        issued: list[Instruction] = []
        for ref in step.reads:
            maker = self.groups.maker.get(ref.id, -1)
            if maker in self.groups.members:
                issued += self.make(maker, event)
        return issued

    def make(self, member: int, event: int) -> list[Instruction]:
        stay = self.stay_of[self.groups.number[member], event]
        step = self.groups.steps[member]
        issued: list[Instruction] = []
        if (member, stay) not in self.made:
            if member in self.gathers(stay):  # not ready when its stay began
                issued += self.gather(stay)
            else:
                self.made.add((member, stay))
                issued += self.make_all(step, event)
                issued += _issued(self.renamed(step, event, stay))
        return [*issued, *(Wait(each) for each in self.waiting.pop(stay, ()))]

    # --- names ---

    def renamed(self, step: Step, event: int, stay: int | None = None) -> Any:
        """A step that reads the gathered values of an event."""

        def read(ref: Ref) -> Ref:
            maker = self.groups.maker.get(ref.id, -1)
            if maker not in self.groups.members:
                return ref
            return self.name(ref, self.stay_of[self.groups.number[maker], event])

        def write(ref: Ref) -> Ref:
            return ref if stay is None else self.name(ref, stay)

        return renamed(step, read, write)

    def renamed_for(self, step: Step, stay: int) -> Any:
        """A feeder or a gather of a stay."""

        def read(ref: Ref) -> Ref:
            fed = self.groups.maker.get(ref.id, -1) in self.groups.feeders
            return self.name(ref, stay) if fed else ref

        return renamed(step, read, lambda ref: self.name(ref, stay))

    def name(self, ref: Ref, stay: int) -> Ref:
        """The name of a value in a stay: the first one keeps that of the graph."""
        if (ref.id, stay) not in self.names:
            first = ref not in self.named
            self.named.add(ref)
            self.names[ref.id, stay] = ref if first else self._fresh(ref)
        return self.names[ref.id, stay]

    def _fresh(self, like: Ref) -> Ref:
        made = Ref(next(self.fresh))
        self.values[made.id] = self.values[like.id]
        return made

    # --- bytes ---

    def _nbytes(self, ref: Ref) -> int:
        return self.values[ref.id].nbytes((0,) * self.axes)

    def _scratch(self, ref: Ref) -> Ref | None:
        return self._fresh(ref) if self.receives else None


_PARTS = 4  # buckets of gradients in the largest group


def _issued(step: Step) -> list[Instruction]:
    return [Start(step), Wait(step)] if isinstance(step, Transfer) else [step]


# --- releases -------------------------------------------------------------------------


def _with_releases(
    instructions: Sequence[Instruction], kept: set[Ref]
) -> tuple[Instruction, ...]:
    """Release every value after the last instruction that touches it."""
    last: dict[Ref, int] = {}
    for position, instruction in enumerate(instructions):
        held = instruction.transfer.held if isinstance(instruction, Wait) else ()
        for ref in (*instruction.reads, *instruction.writes, *held):
            last[ref] = position
    ending: dict[int, list[Ref]] = defaultdict(list)
    for ref, position in last.items():
        if ref not in kept:
            ending[position].append(ref)
    result: list[Instruction] = []
    for position, instruction in enumerate(instructions):
        result.append(instruction)
        if position in ending:
            result.append(Free(tuple(ending[position])))
    return tuple(result)
