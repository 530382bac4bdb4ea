"""place: every value of the global graph gets a placement on every mesh axis.

Three rules make it FSDP rather than whatever is cheapest here and now:

1. State that meets batch is gathered, and batch never moves. The gather stands at the
   narrowest point behind the meeting: what lies between is replayed on gathered values.
2. A pending sum is reduced as late as it stays linear, and once: at its first use that
   is not linear, or where it is made if it has several uses.
3. What no rule knows is gathered and computed whole.

Values made of constants are made where they are used, in the placement wanted. So are
those that small replicated values go into, element by element: random bits of a key.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _rules
from ._choose import choose, linear_choices, pends
from ._graph import Graph, Node, Ref, refs
from ._layout import Meta, Placements, Split, covers
from ._placed import Placed, Value
from ._rule_kinds import Site
from ._schedule import Schedule
from ._sharding import Sharding
from ._versions import Versions

aten = torch.ops.aten
_log = logging.getLogger("yafsdp_fn")

# --- placing --------------------------------------------------------------------------


def place(
    graph: Graph,
    sizes: Sequence[int],
    inputs: Sequence[Placements],
    outputs: Sequence[Placements | None],
    expressible: Callable[[Placements, Meta], bool],
    schedule: Schedule,
) -> Placed:
    """Choose placements and insert the moves that they need.

    Args:
        graph: The global graph.
        sizes: Ranks along each mesh axis.
        inputs: How each input of the graph lies on the mesh.
        outputs: How each output must lie; `None` leaves it as it comes out.
        expressible: Whether an output may be left in a placement.
        schedule: When and in which dtype pending sums are reduced.

    Returns:
        The placed graph.
    """
    placer = _Placer(graph, tuple(sizes), schedule, expressible=expressible)
    placer.add_inputs(inputs)
    for node in graph.nodes:
        placer.place(node)
    finals = [
        placer.output(output.value, wanted)
        for output, wanted in zip(graph.outputs, outputs, strict=True)
    ]
    return placer.finish(finals)


@dataclass(kw_only=True)
class _Placer(Versions):
    expressible: Callable[[Placements, Meta], bool]
    inputs: list[Value] = field(default_factory=list)
    readers: dict[int, list[Node | None]] = field(default_factory=dict)  # None: output

    def __post_init__(self) -> None:
        super().__post_init__()
        for node in self.graph.nodes:
            for number in {ref.id for ref in refs((node.args, node.kwargs))}:
                self.readers.setdefault(number, []).append(node)
        self.of_batch = {i.ref.id for i in self.graph.inputs if i.role == "batch"}
        for node in self.graph.nodes:
            read = {ref.id for ref in refs((node.args, node.kwargs))}
            if not read.isdisjoint(self.of_batch):
                self.of_batch |= {ref.id for ref in refs(node.outputs)}
        for output in self.graph.outputs:
            for ref in refs(output.value):
                self.readers.setdefault(ref.id, []).append(None)

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

    # --- one operator ---

    def place(self, node: Node) -> None:
        operands = [self.current[r.id] for r in refs((node.args, node.kwargs))]
        if self.can_wait(node, operands):
            self.place_constant(node, operands)
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
            if value.is_pending and not self.waits(ref, value):
                self.current[ref.id] = self.resolve(value)

    def waits(self, ref: Ref, value: Value) -> bool:
        """Whether a pending value is better reduced at its use than where it is made.

        So it is for one use that adds it to others or makes less of it, and for several
        that are smaller together. Else it is reduced at once, so that its reduction
        runs under what is computed before the use.
        """
        readers = self.readers.get(ref.id, [])
        if len(readers) <= 1:
            return value.meta.numel == 1 or self.shrinks_or_adds_up(ref)
        products = [n for n in readers if n is not None and _rules.is_product(n.op)]
        made = (self.graph.metas[r.id].numel for n in products for r in refs(n.outputs))
        return len(products) == len(readers) and sum(made) <= value.meta.numel

    def shrinks_or_adds_up(self, ref: Ref) -> bool:
        """Whether what becomes of a value is smaller, or one summand of several.

        A view or a conversion waits for what is done with it: a gradient has its leaf's
        shape and dtype then.
        """
        while True:
            readers = self.readers.get(ref.id, [])
            node = readers[0] if len(readers) == 1 else None
            if node is None:
                return False
            made = self.graph.metas[node.outputs[0].id] if node.outputs[0] else None
            if made is None or made.numel < self.graph.metas[ref.id].numel:
                return made is not None
            if node.op in _rules.VIEWS or node.op is aten._to_copy.default:
                return True
            if node.op in _SUMS:
                others = (r for r in refs((node.args, node.kwargs)) if r != ref)
                return any(self.may_be_pending(other) for other in others)
            if node.op not in _SCALES or node.args[0] != ref:
                return False
            ref = node.outputs[0]  # type: ignore[assignment]

    def may_be_pending(self, ref: Ref) -> bool:
        """Whether a value is pending, or may be once it has been placed."""
        known = self.current.get(ref.id)
        return ref.id in self.of_batch if known is None else known.is_pending

    def can_wait(self, node: Node, operands: Sequence[Value]) -> bool:
        """Whether to make a value only once it is known which part of it is wanted.

        Constants alone can always wait. Beside them may go replicated values that are
        small against the result, in operators that cost no more in parts.
        """
        made = [v for v in operands if not v.is_free]
        if not made and not any(v.seeded for v in operands):
            return True
        metas = (self.graph.metas[r.id] for r in node.outputs if r is not None)
        small = min((meta.numel for meta in metas), default=0) // _SMALL
        return _rules.is_local(node.op) and all(
            v.placements == self.whole and v.meta.numel <= small for v in made
        )

    def place_constant(self, node: Node, operands: Sequence[Value]) -> None:
        seeded = any(v.seeded or not v.is_free for v in operands)
        for ref in filter(None, node.outputs):
            meta = self.graph.metas[ref.id]
            value = self.new(meta, self.whole, constant=node, seeded=seeded)
            self.current[ref.id] = value

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

    # --- pending values ---

    def resolve_unless_linear(self, node: Node, rule: Sharding | None) -> None:
        """Reduce the pending operands of an operator that is not linear in them."""
        numbers = [r.id for r in refs((node.args, node.kwargs))]
        operands = [self.current[n] for n in numbers]
        axes = [a for a in range(len(self.sizes)) if any(pends(v, a) for v in operands)]
        waits = self.schedule.reduce == "once" or not _adds_up(operands)
        if rule is not None and all(
            waits and any(True for _ in linear_choices(rule, operands, a)) for a in axes
        ):
            return
        for number in numbers:
            if self.current[number].is_pending:
                self.current[number] = self.resolve(self.current[number])

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


def _adds_up(operands: Sequence[Value]) -> bool:
    """Whether several pending gradients come together."""
    return sum(v.is_pending and v.meta.numel > 1 for v in operands) > 1


_SUMS = {aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default}
_SCALES = {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten.clone.default,
}
_SMALL = 8  # how often a replicated value must fit into what waits with it


_noticed: set[Any] = set()


def _notice(node: Node) -> None:
    """Name, once, an operator that is computed whole."""
    if node.op not in _noticed:
        _noticed.add(node.op)
        _log.info("%s: %s has no sharding rule, computed whole", node.line, node.op)
