"""The versions of a value: the same global value in the placements that are wanted.

A version is made in the cheapest way: it may be there already; constants are made anew,
the part that is wanted alone; what was made of state is gathered at the narrowest point
behind it and repeated from there; all else is moved.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _rules
from ._choose import needs_of_result
from ._graph import Graph, Node, Ref, map_leaves, refs
from ._layout import (
    SUM,
    WHOLE,
    Meta,
    Pending,
    Placements,
    Split,
    covers,
    replace,
)
from ._placed import (
    AllGather,
    AllReduce,
    First,
    Move,
    ReduceScatter,
    Slice,
    Step,
    Value,
)
from ._rule_kinds import Site
from ._schedule import Schedule
from ._sharding import Sharding


@dataclass
class Versions:
    """All values that exist so far, and the steps that make them.

    Attributes:
        graph: The global graph.
        sizes: Ranks along each mesh axis.
        schedule: In which dtype pending sums are reduced.
        steps: The steps, in the order in which they are executed.
        values: The values by their number.
        current: The value that stands for one of the global graph, by its number there.
        versions: The values of a family by their placements.
        targets: Where a gradient of a shape is scattered to: as the state of the shape.
    """

    graph: Graph
    sizes: tuple[int, ...]
    schedule: Schedule = field(default_factory=Schedule)
    steps: list[Step] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    current: dict[int, Value] = field(default_factory=dict)
    versions: dict[tuple[int, Placements], Value] = field(default_factory=dict)
    targets: dict[tuple[int, ...], Placements] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.whole: Placements = (WHOLE,) * len(self.sizes)

    # --- making values ---

    def new(self, meta: Meta, placements: Placements, **options: Any) -> Value:
        ref = Ref(len(self.values))
        family = options.pop("family", ref.id)
        value = Value(ref, meta, placements, family, **options)
        self.values[ref.id] = value
        if not value.is_free:
            self.versions[family, placements] = value
        return value

    def emit(
        self, step: Step, metas: Sequence[Meta | None], **kind: Any
    ) -> list[Value]:
        """Append a step and make its results; `kind` holds a list for each option."""
        made = []
        for n, meta in enumerate(metas):
            if meta is not None:
                options = {key: values[n] for key, values in kind.items()}
                made.append(self.new(meta, made_by=step, **options))
        self.steps.append(step)
        return made

    def next_refs(self, metas: Sequence[Meta | None]) -> tuple[Ref | None, ...]:
        count = len(self.values)
        numbers = iter(range(count, count + len(metas)))
        return tuple(None if m is None else Ref(next(numbers)) for m in metas)

    def site(self, node: Node) -> Site:
        metas = self.graph.metas
        inputs = tuple(metas[r.id] for r in refs((node.args, node.kwargs)))
        outputs = tuple(None if r is None else metas[r.id] for r in node.outputs)
        return Site(node, inputs, outputs)

    def apply(
        self,
        node: Node,
        site: Site,
        rule: Sharding | None,
        inputs: Sequence[Value],
        results: Sequence[Placements],
        replay_of: Value | None = None,
        constants: Sequence[Value] = (),
    ) -> list[Value]:
        """Emit an operator on operands that lie as it needs them."""
        remaining = iter(inputs)
        args, kwargs = map_leaves(
            lambda leaf: next(remaining).ref if isinstance(leaf, Ref) else leaf,
            (node.args, node.kwargs),
        )
        outputs = self.next_refs(site.outputs)
        replay = replay_of is not None or _views_gathered(node.op, inputs)
        step = Step(
            node.op,
            args,
            kwargs,
            tuple(inputs),
            outputs,
            node.line,
            rule,
            replay=replay,
        )
        batch = any(v.batch and v.placements != self.whole for v in inputs)
        label = next((v.label for v in inputs if v.label and not v.batch), "")
        count = len(site.outputs)
        kind: dict[str, list[Any]] = {
            "placements": list(results),
            "batch": [batch] * count,
            "label": ["" if batch else label] * count,
        }
        if replay_of is not None:
            kind["family"] = [replay_of.family]
        if constants:
            for name in ("family", "constant", "seeded"):
                kind[name] = [getattr(v, name) for v in constants]
        return self.emit(step, site.outputs, **kind)

    # --- moving values ---

    def want(self, value: Value, target: Placements, planned: bool = True) -> Value:
        """A value in the placement that is wanted."""
        if (value.family, target) in self.versions:
            return self.versions[value.family, target]
        if value.constant is not None:  # never moved, rather made again
            return self.materialise(value, target)
        if value.is_pending and not any(isinstance(p, Pending) for p in target):
            return self.want(self.resolve(value), target, planned)
        if not value.batch and self.replays(value, target):
            return self.replay(value, target)
        return self.redistribute(value, target, planned)

    def redistribute(self, value: Value, target: Placements, planned: bool) -> Value:
        planned = planned and not value.batch
        for axis in reversed(range(len(self.sizes))):
            placement = value.placements[axis]
            if isinstance(placement, Split) and _must_gather(value, target, axis):
                move = AllGather(axis, placement.dim, placement.chunk)
                whole = replace(value.placements, axis, WHOLE)
                value = self.move(value, move, whole, planned)
        for axis, wanted in enumerate(target):
            if value.placements[axis] != wanted:
                cut = (
                    Slice(axis, wanted.dim, wanted.chunk)
                    if isinstance(wanted, Split)
                    else First(axis)
                )
                value = self.move(value, cut, replace(value.placements, axis, wanted))
        return value

    def move(
        self, value: Value, move: Move, placements: Placements, planned: bool = True
    ) -> Value:
        """Emit a move, unless the value already lies there."""
        known = self.versions.get((value.family, placements))
        if known is not None:
            return known
        outputs = self.next_refs([value.meta])
        step = Step(move, (value.ref,), {}, (value,), outputs, planned=planned)
        return self.emit(
            step,
            [value.meta],
            placements=[placements],
            family=[value.family],
            batch=[value.batch and not isinstance(move, ReduceScatter)],
            label=[value.label],
        )[0]

    # --- pending values ---

    def resolve(self, value: Value) -> Value:
        """Reduce a pending value, onto the placement of the state of its shape.

        What comes out is state: its splits are those of a leaf, not of the batch.
        """
        dtype = self.schedule.reduce_dtype
        if dtype not in (None, value.meta.dtype) and _travels(value):
            reduced = self.reduce(self.converted(value, dtype))
            return self.converted(reduced, value.meta.dtype)
        return self.reduce(value)

    def converted(self, value: Value, dtype: Any) -> Value:
        """The same value in another dtype."""
        meta = dataclasses.replace(value.meta, dtype=dtype)
        op, outputs = torch.ops.aten._to_copy.default, self.next_refs([meta])
        step = Step(op, (value.ref,), {"dtype": dtype}, (value,), outputs)
        return self.emit(
            step,
            [meta],
            placements=[value.placements],
            batch=[value.batch],
            label=[value.label],
        )[0]

    def reduce(self, value: Value) -> Value:
        """Scatter a pending sum where its state lies, and all-reduce what is left."""
        target = self.targets.get(value.meta.shape, self.whole)
        if value.batch and value.is_split:  # an activation that has a leaf's shape
            target = self.whole
        for axis, placement in enumerate(value.placements):
            wanted = target[axis]
            if placement == WHOLE and isinstance(wanted, Split) and value.is_pending:
                value = self.sliced(value, axis, wanted)
            if placement != SUM or not isinstance(wanted, Split):
                continue
            scattered = replace(value.placements, axis, wanted)
            covered = covers(value.meta.shape, scattered, self.sizes)
            if covered and not _cuts(value.placements, wanted.dim, after=axis):
                move = ReduceScatter(axis, wanted.dim, wanted.chunk)
                value = self.move(value, move, scattered)
        for axis, placement in enumerate(value.placements):
            if isinstance(placement, Pending):
                move_all = AllReduce(axis, placement.op)
                value = self.move(
                    value, move_all, replace(value.placements, axis, WHOLE)
                )
        return value

    def sliced(self, value: Value, axis: int, wanted: Split) -> Value:
        """Cut a whole axis first, where an inner one is scattered on the same dim."""
        cut = replace(value.placements, axis, wanted)
        if _cuts(value.placements, wanted.dim, after=axis):
            return value
        return self.move(value, Slice(axis, wanted.dim, wanted.chunk), cut)

    # --- constants ---

    def materialise(self, value: Value, target: Placements) -> Value:
        """Make a constant, only the part that is wanted if its operators allow it.

        Random bits stand on hundreds of operators: a list of what is still to be made
        takes the place of recursion.
        """
        waiting = [(value, target)]
        while waiting:
            missing = [
                (v, placements)
                for v, placements in self.ingredients(*waiting[-1])
                if v.constant is not None
                and (v.family, placements) not in self.versions
            ]
            waiting += missing
            if not missing:
                self.make(*waiting.pop())
        return self.versions[value.family, target]

    def ingredients(
        self, value: Value, target: Placements
    ) -> list[tuple[Value, Placements]]:
        """What must be there, and lie how, before a constant can be made."""
        node = value.constant
        assert node is not None
        needs = self.needs_for(node, target)
        if needs is None or self.is_made_whole(value):
            return [(value, self.whole)]
        operands = [self.current[r.id] for r in refs((node.args, node.kwargs))]
        return list(zip(operands, needs, strict=True))

    def is_made_whole(self, value: Value) -> bool:
        """Whether random bits are there already, so that a part needs only a cut."""
        return value.seeded and (value.family, self.whole) in self.versions

    def make(self, value: Value, target: Placements) -> None:
        node = value.constant
        assert node is not None
        if (value.family, target) in self.versions:
            return
        inputs = [self.want(v, p) for v, p in self.ingredients(value, target)]
        if len(inputs) == 1 and inputs[0].family == value.family:
            self.redistribute(inputs[0], target, planned=True)
            return
        site = self.site(node)
        made = [self.current[r.id] for r in node.outputs if r is not None]
        results = [target] * len(site.outputs)
        self.apply(node, site, _rules.find(site), inputs, results, constants=made)

    def needs_for(self, node: Node, target: Placements) -> list[Placements] | None:
        """How operands must lie so that all results lie as wanted, or None."""
        site = self.site(node)
        if target == self.whole:
            return [self.whole] * len(site.inputs)
        rule = _rules.find(site)
        if rule is None or rule.outputs[0] is None or len({*rule.outputs}) > 1:
            return None
        needs = needs_of_result(rule, target)
        metas = zip(site.inputs, needs or (), strict=False)
        covered = all(covers(m.shape, p, self.sizes) for m, p in metas)
        return needs if covered else None

    # --- replays ---

    def replays(self, value: Value, target: Placements) -> bool:
        """Whether to gather further back and repeat the step that made a value."""
        step = value.made_by
        if step is None or not _can_replay(step):
            return False
        behind = self.behind(step, target)
        if behind is None:
            return False
        return (
            behind <= value.meta.nbytes
            if _is_view(step)
            else (behind < value.meta.nbytes)
        )

    def behind(self, step: Step, target: Placements) -> float | None:
        """Bytes to gather if a step is repeated on gathered operands."""
        assert step.sharding is not None
        needs = needs_of_result(step.sharding, target)
        if needs is None or not self.cover(step.operands, needs):
            return None
        return sum(
            self.gather_cost(v, need)
            for v, need in zip(step.operands, needs, strict=True)
        )

    def cover(self, operands: Sequence[Value], needs: list[Placements]) -> bool:
        pairs = zip(operands, needs, strict=True)
        return all(covers(v.meta.shape, p, self.sizes) for v, p in pairs)

    def gather_cost(self, value: Value, target: Placements) -> float:
        if (value.family, target) in self.versions:
            return 0
        if value.constant is not None:
            return float(value.meta.nbytes) if value.seeded else 0.0
        if value.is_pending or value.batch:
            return float("inf")
        step = value.made_by
        here = float(value.meta.nbytes)
        behind = self.behind(step, target) if step and _can_replay(step) else None
        return here if behind is None else min(here, behind)

    def replay(self, value: Value, target: Placements) -> Value:
        step = value.made_by
        assert step is not None
        assert step.sharding is not None
        needs = needs_of_result(step.sharding, target)
        assert needs is not None
        inputs = [self.want(v, p) for v, p in zip(step.operands, needs, strict=True)]
        node = Node(step.op, step.args, step.kwargs, step.outputs, step.line)
        site = Site(node, tuple(v.meta for v in step.operands), (value.meta,))
        return self.apply(node, site, step.sharding, inputs, [target], value)[0]


# --- helpers --------------------------------------------------------------------------


def _travels(value: Value) -> bool:
    """Whether a pending value is a gradient, not a number that decides something."""
    sums = all(p == SUM for p in value.placements if isinstance(p, Pending))
    return sums and value.meta.numel > 1 and value.meta.dtype.is_floating_point


def _cuts(placements: Placements, dim: int, after: int) -> bool:
    """Whether an axis inside `after` already splits `dim`."""
    return any(isinstance(p, Split) and p.dim == dim for p in placements[after + 1 :])


def _must_gather(value: Value, target: Placements, axis: int) -> bool:
    """Whether an axis must be gathered on the way to `target`.

    An axis that cuts inside another one must be gathered before the outer one changes.
    """
    placement = value.placements[axis]
    assert isinstance(placement, Split)
    if placement != target[axis]:
        return True
    outer = zip(value.placements[:axis], target[:axis], strict=True)
    return any(
        have != wanted
        and any(isinstance(p, Split) and p.dim == placement.dim for p in (have, wanted))
        for have, wanted in outer
    )


def _is_view(step: Step) -> bool:
    return step.op in _rules.VIEWS


def _views_gathered(op: Any, inputs: Sequence[Value]) -> bool:
    """Whether a value is a view of gathered memory, and so lives no longer than it."""
    makers = [v.made_by for v in inputs if v.made_by is not None]
    return op in _rules.VIEWS and any(
        (isinstance(m.op, AllGather) and m.planned) or m.replay for m in makers
    )


def _can_replay(step: Step) -> bool:
    if step.sharding is None or len(step.outputs) != 1 or step.replay:
        return False
    elementwise = _rules.is_elementwise(step.op)
    return _is_view(step) or elementwise
