"""plan: when gathers and reductions start, when they are awaited, what is kept.

The plain plan: a group is gathered before the first use of a stretch and freed after
the last one; a group has at most two stretches (forward and backward), cut where its
uses are farthest apart; a reduction starts when its operand is ready; every transfer
is awaited at once.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ._graph import Ref, map_leaves
from ._lower import Local as Step
from ._placed import Placed
from ._program import (
    Adjust,
    Compute,
    Free,
    Instruction,
    Local,
    Program,
    Start,
    Transfer,
    Wait,
)


def plan(placed: Placed, steps: Sequence[Step], axes: Sequence[str]) -> Program:
    """Schedule the graph of a rank.

    Args:
        placed: The placed graph, for what is known of its values.
        steps: The rank's graph.
        axes: Names of the mesh axes.

    Returns:
        The program.
    """
    values = {
        number: Local(value.meta, value.placements, value.label)
        for number, value in placed.values.items()
    }
    outputs = tuple(None if v is None else v.ref for v in placed.outputs)
    planner = _Planner(steps, values, {r.id for r in outputs if r is not None})
    instructions = planner.schedule()
    inputs = tuple(value.ref for value in placed.inputs)
    kept = {r for r in (*inputs, *outputs) if r is not None}
    freed = _with_releases(instructions, kept)
    return Program(tuple(axes), placed.sizes, planner.values, inputs, outputs, freed)


@dataclass
class _Planner:
    steps: Sequence[Step]
    values: dict[int, Local]
    returned: set[int]
    stretches: dict[int, dict[int, int]] = field(default_factory=dict)
    names: dict[tuple[int, int], Ref] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.maker = {r.id: n for n, step in enumerate(self.steps) for r in step.writes}
        self.group = _groups(self.steps, self.maker, self.returned)
        self.stretches = _stretches(self.steps, self.group, self.maker)
        self.made: set[tuple[int, int]] = set()
        self.fresh = itertools.count(max(self.values, default=0) + 1)

    def schedule(self) -> list[Instruction]:
        scheduled: list[Instruction] = []
        for position, step in enumerate(self.steps):
            if position not in self.group:
                scheduled += self.gathers_for(position, step)
                scheduled += _issued(self.renamed(step, position))
        return scheduled

    def gathers_for(self, position: int, step: Step) -> list[Instruction]:
        """Gathers and replays that a step needs and its stretch does not hold yet."""
        issued: list[Instruction] = []
        for ref in step.reads:
            maker = self.maker.get(ref.id)
            if maker is not None and maker in self.group:
                issued += self.make(maker, position)
        return issued

    def make(self, member: int, position: int) -> list[Instruction]:
        stretch = self.stretch(member, position)
        if (member, stretch) in self.made:
            return []
        self.made.add((member, stretch))
        step = self.steps[member]
        return [
            *self.gathers_for(position, step),
            *_issued(self.renamed(step, position, targets=True)),
        ]

    def stretch(self, member: int, position: int) -> int:
        return self.stretches[self.group[member]][position]

    def renamed(self, step: Step, position: int, targets: bool = False) -> Step:
        """A step that reads (and, for members, writes) the values of a stretch."""

        def name(leaf: Any) -> Any:
            return self.name(leaf, position) if isinstance(leaf, Ref) else leaf

        if isinstance(step, Compute):
            args, kwargs = map_leaves(name, (step.args, step.kwargs))
            outputs = map_leaves(name, step.outputs) if targets else step.outputs
            return replace(step, args=args, kwargs=kwargs, outputs=outputs)
        if isinstance(step, Adjust):
            return replace(step, source=name(step.source))
        written = map_leaves(name, step.targets) if targets else step.targets
        return replace(step, sources=map_leaves(name, step.sources), targets=written)

    def name(self, ref: Ref, position: int) -> Ref:
        """The name of a gathered value in the stretch of a use: each has its own."""
        maker = self.maker.get(ref.id)
        if maker is None or maker not in self.group:
            return ref
        stretch = self.stretch(maker, position)
        if stretch == 0:
            return ref
        if (ref.id, stretch) not in self.names:
            fresh = Ref(next(self.fresh))
            self.values[fresh.id] = self.values[ref.id]
            self.names[ref.id, stretch] = fresh
        return self.names[ref.id, stretch]


def _issued(step: Step) -> list[Instruction]:
    return [Start(step), Wait(step)] if isinstance(step, Transfer) else [step]


# --- groups and stretches -------------------------------------------------------------


def _groups(
    steps: Sequence[Step], maker: Mapping[int, int], returned: set[int]
) -> dict[int, int]:
    """The gathers and replays, each with the number of its group.

    Members are gathers of state and what is replayed on gathered values alone. A group
    is a set of members that depend on each other.
    """
    group: dict[int, int] = {}
    for position, step in enumerate(steps):
        behind = [maker[r.id] for r in step.reads if r.id in maker]
        inside = [group[m] for m in behind if m in group]
        kept = any(r.id in returned for r in step.writes)
        replayed = _is_replay(step) and 0 < len(inside) == len(behind)
        if (_is_gather(step) or replayed) and not kept:
            group[position] = position
            _merge(group, position, inside)
    return group


def _is_gather(step: Step) -> bool:
    return isinstance(step, Transfer) and step.kind == "all_gather" and step.planned


def _is_replay(step: Step) -> bool:
    return isinstance(step, Compute) and step.replay


def _merge(group: dict[int, int], new: int, others: Iterable[int]) -> None:
    joined = {new, *others}
    for member, number in group.items():
        if number in joined:
            group[member] = min(joined)


def _stretches(
    steps: Sequence[Step], group: Mapping[int, int], maker: Mapping[int, int]
) -> dict[int, dict[int, int]]:
    """For every group, the stretch (0 or 1) that each use of it belongs to."""
    uses: dict[int, list[int]] = defaultdict(list)
    for position, step in enumerate(steps):
        if position not in group:
            for ref in step.reads:
                member = maker.get(ref.id, -1)
                if member in group and position not in uses[group[member]]:
                    uses[group[member]].append(position)
    return {number: _cut(at, number, uses) for number, at in uses.items()}


def _cut(
    at: Sequence[int], number: int, uses: Mapping[int, Sequence[int]]
) -> dict[int, int]:
    """Cut a group's uses at the widest gap in which other groups are used."""
    gaps = [(after - before, after) for before, after in itertools.pairwise(at)]
    width, start = max(gaps, default=(0, 0))
    others = (p for other, ps in uses.items() if other != number for p in ps)
    crossed = any(start - width < position < start for position in others)
    return {position: int(crossed and position >= start) for position in at}


# --- releases -------------------------------------------------------------------------


def _with_releases(
    instructions: Sequence[Instruction], kept: set[Ref]
) -> tuple[Instruction, ...]:
    """Release every value after the last instruction that touches it."""
    last: dict[Ref, int] = {}
    for position, instruction in enumerate(instructions):
        for ref in (*instruction.reads, *instruction.writes, *_sources(instruction)):
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


def _sources(instruction: Instruction) -> tuple[Ref, ...]:
    return instruction.transfer.sources if isinstance(instruction, Wait) else ()
