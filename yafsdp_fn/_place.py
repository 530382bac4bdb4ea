"""place: every value of the global graph gets a placement on every mesh axis.

Three rules make it FSDP rather than whatever is cheapest here and now:

1. State that meets batch is gathered, and batch never moves. The gather stands at the
   narrowest point behind the meeting: what lies between is replayed on gathered values.
2. A pending sum is reduced as late as it stays linear, and once: at its first use that
   is not linear, or where it is made if it has several uses.
3. What no rule knows is gathered and computed whole.

Values made of constants alone are made where they are used, in the placement wanted.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _rules
from ._choose import choose, linear_choices, needs_of_result, pends
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
    Placed,
    ReduceScatter,
    Slice,
    Step,
    Value,
)
from ._rule_kinds import Site
from ._sharding import Sharding

_log = logging.getLogger("yafsdp_fn")

# --- placing --------------------------------------------------------------------------


def place(
    graph: Graph,
    sizes: Sequence[int],
    inputs: Sequence[Placements],
    outputs: Sequence[Placements | None],
    expressible: Callable[[Placements, Meta], bool],
) -> Placed:
    """Choose placements and insert the moves that they need.

    Args:
        graph: The global graph.
        sizes: Ranks along each mesh axis.
        inputs: How each input of the graph lies on the mesh.
        outputs: How each output must lie; `None` leaves it as it comes out.
        expressible: Whether an output may be left in a placement.

    Returns:
        The placed graph.
    """
    placer = _Placer(graph, tuple(sizes), expressible)
    placer.add_inputs(inputs)
    for node in graph.nodes:
        placer.place(node)
    finals = [
        placer.output(output.value, wanted)
        for output, wanted in zip(graph.outputs, outputs, strict=True)
    ]
    return placer.finish(finals)


@dataclass
class _Placer:
    graph: Graph
    sizes: tuple[int, ...]
    expressible: Callable[[Placements, Meta], bool]
    steps: list[Step] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    current: dict[int, Value] = field(default_factory=dict)  # by the graph's numbers
    versions: dict[tuple[int, Placements], Value] = field(default_factory=dict)
    targets: dict[tuple[int, ...], Placements] = field(default_factory=dict)
    inputs: list[Value] = field(default_factory=list)
    uses: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            self.uses.update({ref.id for ref in refs((node.args, node.kwargs))})
        self.uses.update(r.id for o in self.graph.outputs for r in refs(o.value))
        self.whole: Placements = (WHOLE,) * len(self.sizes)

    # --- values ---

    def add_inputs(self, placements: Sequence[Placements]) -> None:
        for entry, placed in zip(self.graph.inputs, placements, strict=True):
            meta = self.graph.metas[entry.ref.id]
            batch = entry.role == "batch"
            value = self.new(meta, placed, batch=batch, label=entry.path)
            self.inputs.append(value)
            self.current[entry.ref.id] = value
            if not batch and any(isinstance(p, Split) for p in placed):
                self.targets.setdefault(meta.shape, placed)
            if value.is_pending:
                self.current[entry.ref.id] = self.resolve(value)

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

    # --- one operator ---

    def place(self, node: Node) -> None:
        operands = [self.current[r.id] for r in refs((node.args, node.kwargs))]
        if all(value.is_free for value in operands):
            self.place_constant(node)
            return
        site = self.site(node)
        placed = any(v.placements != self.whole for v in operands if not v.is_free)
        rule = _rules.find(site) if placed else None
        if placed and rule is None:
            _notice(node)
        self.resolve_unless_linear(node, rule)
        operands = [self.current[r.id] for r in refs((node.args, node.kwargs))]
        results = self.compute(node, site, rule, operands)
        for ref, value in zip(filter(None, node.outputs), results, strict=True):
            self.current[ref.id] = value
            if value.is_pending and self.uses[ref.id] > 1:
                self.current[ref.id] = self.resolve(value)

    def site(self, node: Node) -> Site:
        metas = self.graph.metas
        inputs = tuple(metas[r.id] for r in refs((node.args, node.kwargs)))
        outputs = tuple(None if r is None else metas[r.id] for r in node.outputs)
        return Site(node, inputs, outputs)

    def place_constant(self, node: Node) -> None:
        for ref in node.outputs:
            if ref is not None:
                meta = self.graph.metas[ref.id]
                self.current[ref.id] = self.new(meta, self.whole, constant=node)

    def compute(
        self, node: Node, site: Site, rule: Sharding | None, operands: list[Value]
    ) -> list[Value]:
        needs, results = self.choose(site, rule, operands)
        planned = rule is not None
        inputs = [
            self.want(v, p, planned) for v, p in zip(operands, needs, strict=True)
        ]
        return self.apply(node, site, rule, inputs, results)

    def choose(
        self, site: Site, rule: Sharding | None, operands: list[Value]
    ) -> tuple[list[Placements], list[Placements]]:
        """How operands and results lie: each axis chooses by itself.

        An inner axis cuts what the outer one left. Where the outer choices change that,
        so that the parts no longer make up the whole, the inner axis splits nothing.
        """
        axes = range(len(self.sizes))
        counts = len(operands), len(site.outputs)
        choices = [choose(rule, operands, counts[1], a) for a in axes]
        for inner in (*reversed(axes), -1):
            needs = [tuple(c.needs[n] for c in choices) for n in range(counts[0])]
            results = [tuple(c.results[n] for c in choices) for n in range(counts[1])]
            if self.all_cover(site, needs, results):
                break
            choices[inner] = choose(None, operands, counts[1], inner)
        return needs, results

    def all_cover(
        self, site: Site, needs: list[Placements], results: list[Placements]
    ) -> bool:
        inputs = zip(site.inputs, needs, strict=True)
        outputs = zip(site.outputs, results, strict=True)
        return all(
            meta is None or covers(meta.shape, placements, self.sizes)
            for meta, placements in (*inputs, *outputs)
        )

    def apply(
        self,
        node: Node,
        site: Site,
        rule: Sharding | None,
        inputs: Sequence[Value],
        results: Sequence[Placements],
        replay_of: Value | None = None,
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
        return self.emit(step, site.outputs, **kind)

    # --- pending values ---

    def resolve_unless_linear(self, node: Node, rule: Sharding | None) -> None:
        """Reduce the pending operands of an operator that is not linear in them."""
        numbers = [r.id for r in refs((node.args, node.kwargs))]
        operands = [self.current[n] for n in numbers]
        axes = [a for a in range(len(self.sizes)) if any(pends(v, a) for v in operands)]
        if rule is not None and all(
            any(True for _ in linear_choices(rule, operands, a)) for a in axes
        ):
            return
        for number in numbers:
            if self.current[number].is_pending:
                self.current[number] = self.resolve(self.current[number])

    def resolve(self, value: Value) -> Value:
        """Reduce a pending value, onto the placement of the state of its shape.

        What comes out is state: its splits are those of a leaf, not of the batch.
        """
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

    # --- moving values ---

    def want(self, value: Value, target: Placements, planned: bool = True) -> Value:
        """A value in the placement that is wanted."""
        if (value.family, target) in self.versions:
            return self.versions[value.family, target]
        if value.is_free:
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

    # --- constants and replays ---

    def materialise(self, value: Value, target: Placements) -> Value:
        """Make a constant, only the part that is wanted if its operator allows it."""
        node = value.constant
        assert node is not None
        needs = self.needs_for(node, target)
        if needs is None:
            whole = self.want(value, self.whole)
            return self.redistribute(whole, target, planned=True)
        site = self.site(node)
        inputs = [
            self.want(self.current[r.id], p)
            for r, p in zip(refs((node.args, node.kwargs)), needs, strict=True)
        ]
        rule = _rules.find(site)
        results = [target] * len(site.outputs)
        made = self.apply(node, site, rule, inputs, results)
        for ref, result in zip(filter(None, node.outputs), made, strict=True):
            family = self.current[ref.id].family
            self.versions[family, result.placements] = result
        return self.versions[value.family, target]

    def needs_for(self, node: Node, target: Placements) -> list[Placements] | None:
        """How operands must lie so that a sole result lies as wanted, or None."""
        site = self.site(node)
        if target == self.whole:
            return [self.whole] * len(site.inputs)
        rule = _rules.find(site)
        if rule is None or len(site.outputs) != 1 or rule.outputs[0] is None:
            return None
        needs = needs_of_result(rule, target)
        metas = zip(site.inputs, needs or (), strict=False)
        covered = all(covers(m.shape, p, self.sizes) for m, p in metas)
        return needs if covered else None

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

    # --- results ---

    def output(self, value: Any, wanted: Placements | None) -> Value | None:
        if not isinstance(value, Ref):
            return None
        placed = self.current[value.id]
        if wanted is not None:
            return self.want(placed, wanted)
        if placed.is_pending:
            placed = self.resolve(placed)
        if placed.is_free or not self.expressible(placed.placements, placed.meta):
            return self.want(placed, self.whole)
        return placed

    def finish(self, outputs: Sequence[Value | None]) -> Placed:
        """Drop steps without use; some versions were made for a use that moved on."""
        needed = {v.ref.id for v in outputs if v is not None}
        kept = []
        for step in reversed(self.steps):
            if any(r is not None and r.id in needed for r in step.outputs):
                needed.update(v.ref.id for v in step.operands)
                kept.append(step)
        steps = tuple(reversed(kept))
        return Placed(
            self.sizes, tuple(self.inputs), steps, self.values, tuple(outputs)
        )


# --- helpers --------------------------------------------------------------------------


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


_noticed: set[Any] = set()


def _notice(node: Node) -> None:
    """Name, once, an operator that is computed whole."""
    if node.op not in _noticed:
        _noticed.add(node.op)
        _log.info("%s: %s has no sharding rule, computed whole", node.line, node.op)
