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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _rules
from ._layout import SUM, WHOLE, Meta, Pending, Placement, Placements, Split, replace
from ._rules import Site
from ._sharding import Sharding
from ._trace import Graph, Node, Ref, map_leaves, refs

_log = logging.getLogger("yafsdp_fn")

# --- the placed graph -----------------------------------------------------------------


@dataclass(frozen=True)
class AllGather:
    """Ranks of an axis exchange their parts of `dim`."""

    axis: int
    dim: int
    chunk: int


@dataclass(frozen=True)
class ReduceScatter:
    """Sum over the ranks of an axis; each keeps its part of `dim`."""

    axis: int
    dim: int
    chunk: int


@dataclass(frozen=True)
class AllReduce:
    """Sum, maximum or minimum over the ranks of an axis."""

    axis: int
    op: str


@dataclass(frozen=True)
class Slice:
    """A rank's own part of a value that it holds whole; moves nothing."""

    axis: int
    dim: int
    chunk: int


@dataclass(frozen=True)
class First:
    """A whole value as a pending sum: rank 0 keeps it, the others hold zeros."""

    axis: int


Collective = AllGather | ReduceScatter | AllReduce
Move = Collective | Slice | First


@dataclass(frozen=True, eq=False)
class Value:
    """A value with its placement.

    `family` is shared by all placements of the same global value; `batch` tells that
    its splits come from the batch, so that it must not move; `label` is the path of the
    leaf that it was made from.
    """

    ref: Ref
    meta: Meta
    placements: Placements
    family: int
    batch: bool = False
    label: str = ""
    made_by: "Step | None" = None
    constant: Node | None = None

    @property
    def is_free(self) -> bool:
        """Made of constants alone, and not made yet."""
        return self.constant is not None and self.made_by is None

    @property
    def is_pending(self) -> bool:
        return any(isinstance(p, Pending) for p in self.placements)


@dataclass(frozen=True, eq=False)
class Step:
    """An operator or a move on placed values.

    `planned` is false for a collective that none of rules 1 and 2 asked for; `replay`
    marks what is recomputed on gathered values.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Value, ...]
    outputs: tuple[Ref | None, ...]
    line: str = ""
    sharding: Sharding | None = None
    planned: bool = True
    replay: bool = False


@dataclass(frozen=True)
class Placed:
    """A placed graph: what `place` hands to `lower`."""

    sizes: tuple[int, ...]
    inputs: tuple[Value, ...]
    steps: tuple[Step, ...]
    values: Mapping[int, Value]
    outputs: tuple[Value | None, ...]


# --- placing --------------------------------------------------------------------------

_BATCH_COST = 1e6  # a byte of batch against a byte of state


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
class _Choice:
    """What one axis asks of the operands, and what it makes of the results."""

    needs: list[Placement]
    results: list[Placement]


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

    def emit(self, step: Step, metas: Sequence[Meta | None], **kind: Any) -> list[Value]:
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
        choices = [self.choose(site, rule, operands, a) for a in range(len(self.sizes))]
        needs = [tuple(c.needs[n] for c in choices) for n in range(len(operands))]
        results = [
            tuple(c.results[n] for c in choices) for n in range(len(site.outputs))
        ]
        planned = rule is not None
        inputs = [
            self.want(v, p, planned) for v, p in zip(operands, needs, strict=True)
        ]
        return self.apply(node, site, rule, inputs, results)

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
            node.op, args, kwargs, tuple(inputs), outputs, node.line, rule, replay=replay
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

    # --- choosing on one axis ---

    def choose(
        self, site: Site, rule: Sharding | None, operands: list[Value], axis: int
    ) -> _Choice:
        """The cheapest of all ways to compute an operator on one axis."""
        count, results = len(operands), len(site.outputs)
        if rule is not None and any(_pends(v, axis) for v in operands):
            linear = next(self.linear_choices(rule, operands, axis), None)
            assert linear is not None
            return linear
        chosen = _Choice([WHOLE] * count, [WHOLE] * results)
        for inputs, outputs in rule.pieces() if rule else ():
            choice = self.cheapest(rule, operands, inputs, axis)
            for n in inputs:
                chosen.needs[n] = choice.needs[n]
            for n in outputs:
                chosen.results[n] = choice.results[n]
        return chosen

    def cheapest(
        self,
        rule: Sharding,
        operands: list[Value],
        inputs: Sequence[int],
        axis: int,
    ) -> _Choice:
        """Of the splits that some operand has, and none, the one that moves least."""
        choices = list(self.factor_choices(rule, operands, inputs, axis))
        choices.append(
            _Choice([WHOLE] * len(rule.inputs), [WHOLE] * len(rule.outputs))
        )
        return min(
            choices,
            key=lambda c: sum(_cost(operands[n], c.needs[n], axis) for n in inputs),
        )

    def factor_choices(
        self,
        rule: Sharding,
        operands: list[Value],
        inputs: Sequence[int],
        axis: int,
    ) -> Iterator[_Choice]:
        for n in inputs:
            value, dims = operands[n], rule.inputs[n]
            split = value.placements[axis]
            if value.is_free or not isinstance(split, Split):
                continue
            cut = rule.factor_of(dims, split)
            if cut is not None and cut[0] not in rule.whole:
                choice = _split_choice(rule, *cut)
                if choice is not None:
                    yield choice

    def linear_choices(
        self, rule: Sharding, operands: list[Value], axis: int
    ) -> Iterator[_Choice]:
        """Ways to keep a pending sum pending."""
        pending = {n for n, v in enumerate(operands) if _pends(v, axis)}
        sums = all(operands[n].placements[axis] == SUM for n in pending)
        for group in rule.linear:
            others = [v for n, v in enumerate(operands) if n not in pending]
            whole = all(v.is_free or v.placements[axis] == WHOLE for v in others)
            if pending <= group and sums and whole and self.is_small(rule, operands):
                needs = [SUM if n in group else WHOLE for n in range(len(operands))]
                yield _Choice(needs, [SUM] * len(rule.outputs))

    def is_small(self, rule: Sharding, operands: list[Value]) -> bool:
        """Whether a pending result is no larger than the pending operands."""
        pending = sum(v.meta.numel for v in operands if v.is_pending)
        result = sum(_numel(dims, rule) for dims in rule.outputs if dims is not None)
        return result <= max(pending, 1)

    # --- pending values ---

    def resolve_unless_linear(self, node: Node, rule: Sharding | None) -> None:
        """Reduce the pending operands of an operator that is not linear in them."""
        numbers = [r.id for r in refs((node.args, node.kwargs))]
        operands = [self.current[n] for n in numbers]
        axes = [a for a in range(len(self.sizes)) if any(_pends(v, a) for v in operands)]
        if rule is not None and all(
            any(True for _ in self.linear_choices(rule, operands, a)) for a in axes
        ):
            return
        for number in numbers:
            if self.current[number].is_pending:
                self.current[number] = self.resolve(self.current[number])

    def resolve(self, value: Value) -> Value:
        """Reduce a pending value, onto the placement of the state of its shape."""
        target = self.targets.get(value.meta.shape, self.whole)
        for axis, placement in enumerate(value.placements):
            wanted = target[axis]
            if placement == SUM and isinstance(wanted, Split):
                if not _cuts(value.placements, wanted.dim, after=axis):
                    move = ReduceScatter(axis, wanted.dim, wanted.chunk)
                    value = self.move(value, move, replace(value.placements, axis, wanted))
        for axis, placement in enumerate(value.placements):
            if isinstance(placement, Pending):
                move_all = AllReduce(axis, placement.op)
                value = self.move(value, move_all, replace(value.placements, axis, WHOLE))
        return value

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
            batch=[value.batch],
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
        return _needs_of_result(rule, target)

    def replays(self, value: Value, target: Placements) -> bool:
        """Whether to gather further back and repeat the step that made a value."""
        step = value.made_by
        if step is None or not _can_replay(step):
            return False
        behind = self.behind(step, target)
        if behind is None:
            return False
        return behind <= value.meta.nbytes if _is_view(step) else (
            behind < value.meta.nbytes
        )

    def behind(self, step: Step, target: Placements) -> float | None:
        """Bytes to gather if a step is repeated on gathered operands."""
        assert step.sharding is not None
        needs = _needs_of_result(step.sharding, target)
        if needs is None:
            return None
        return sum(
            self.gather_cost(v, need)
            for v, need in zip(step.operands, needs, strict=True)
        )

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
        assert step is not None and step.sharding is not None
        needs = _needs_of_result(step.sharding, target)
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


def _pends(value: Value, axis: int) -> bool:
    return not value.is_free and isinstance(value.placements[axis], Pending)


def _cost(value: Value, need: Placement, axis: int) -> float:
    have = value.placements[axis]
    if value.is_free or have in (need, WHOLE):
        return 0.0
    return value.meta.nbytes * (_BATCH_COST if value.batch else 1.0)


def _numel(dims: Any, rule: Sharding) -> int:
    count = 1
    for dim in dims:
        for factor in dim:
            count *= rule.sizes[factor]
    return count


def _split_choice(rule: Sharding, factor: str, chunk: int) -> _Choice | None:
    """Operands and results when a factor is split into parts of `chunk`."""
    needs: list[Placement] = []
    for n, dims in enumerate(rule.inputs):
        if rule.has(dims, factor):
            split = rule.split_of(dims, factor, chunk)
            if split is None:
                return None
            needs.append(split)
        else:
            adds = n in rule.addend and factor in rule.reduce
            needs.append(SUM if adds else WHOLE)
    results = [_split_result(rule, dims, factor, chunk) for dims in rule.outputs]
    if any(result is None for result in results):
        return None
    return _Choice(needs, [r for r in results if r is not None])


def _split_result(
    rule: Sharding, dims: Any, factor: str, chunk: int
) -> Placement | None:
    if dims is None:
        return WHOLE
    if rule.has(dims, factor):
        return rule.split_of(dims, factor, chunk)
    return Pending(rule.reduce[factor]) if factor in rule.reduce else None


def _needs_of_result(rule: Sharding, target: Placements) -> list[Placements] | None:
    """How the operands lie when the first result lies as `target`."""
    needs: list[list[Placement]] = [[] for _ in rule.inputs]
    for placement in target:
        if isinstance(placement, Pending) or rule.outputs[0] is None:
            return None
        if isinstance(placement, Split):
            cut = rule.factor_of(rule.outputs[0], placement)
            choice = None if cut is None or cut[0] in rule.whole else _split_choice(
                rule, *cut
            )
            if choice is None:
                return None
            rows = choice.needs
        else:
            rows = [WHOLE] * len(rule.inputs)
        for need, row in zip(needs, rows, strict=True):
            need.append(row)
    return [tuple(need) for need in needs]


def _cuts(placements: Placements, dim: int, after: int) -> bool:
    """Whether an axis inside `after` already splits `dim`."""
    return any(
        isinstance(p, Split) and p.dim == dim for p in placements[after + 1 :]
    )


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


_VIEWS = {
    op
    for op, rule in _rules.RULES.items()
    if rule in (_rules.reshape, _rules.squeezes, _rules.select, _rules.slices)
    or op
    in (
        torch.ops.aten.permute.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.t.default,
    )
}


def _is_view(step: Step) -> bool:
    return step.op in _VIEWS


def _views_gathered(op: Any, inputs: Sequence[Value]) -> bool:
    """Whether a value is a view of gathered memory, and so lives no longer than it."""
    makers = [v.made_by for v in inputs if v.made_by is not None]
    return op in _VIEWS and any(
        isinstance(m.op, AllGather) and m.planned or m.replay for m in makers
    )


def _can_replay(step: Step) -> bool:
    if step.sharding is None or len(step.outputs) != 1 or step.replay:
        return False
    elementwise = _rules.RULES.get(step.op) in (None, _rules.pointwise)
    return _is_view(step) or elementwise


_noticed: set[Any] = set()


def _notice(node: Node) -> None:
    """Name, once, an operator that is computed whole."""
    if node.op not in _noticed:
        _noticed.add(node.op)
        _log.info("%s: %s has no sharding rule, computed whole", node.line, node.op)
