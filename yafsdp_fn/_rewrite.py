"""rewrite: operators of the global graph that are put more simply.

Differentiable formulas are written so that they can be differentiated again, and
updates so that they can be added: in a step that does neither, one operator says it.
The result is the same up to rounding; an infinite parameter stays infinite in an update
by an optimiser, where the sum of what is added to it would be NaN.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ._graph import Graph, Node, Ref, live_nodes, map_leaves, refs
from ._kernels import updates
from ._layout import Meta
from ._rules import is_elementwise

aten = torch.ops.aten


def rewrite(graph: Graph) -> Graph:
    """A graph with the same results in fewer operators."""
    rewriter = _Rewriter(graph)
    for node in graph.nodes:
        rewriter.add(node)
    outputs = tuple(
        replace(output, value=rewriter.name(output.value)) for output in graph.outputs
    )
    nodes = live_nodes(rewriter.nodes, outputs)
    return replace(graph, nodes=nodes, outputs=outputs, metas=rewriter.metas)


@dataclass
class _Rewriter:
    graph: Graph
    nodes: list[Node] = field(default_factory=list)
    maker: dict[Ref, Node] = field(default_factory=dict)
    same: dict[Ref, Ref] = field(default_factory=dict)  # values by a simpler name

    def __post_init__(self) -> None:
        self.metas = dict(self.graph.metas)
        self.fresh = itertools.count(max(self.metas, default=0) + 1)

    def name(self, leaf: Any) -> Any:
        return self.same.get(leaf, leaf) if isinstance(leaf, Ref) else leaf

    def add(self, node: Node) -> None:
        args, kwargs = map_leaves(self.name, (node.args, node.kwargs))
        node = replace(node, args=args, kwargs=kwargs)
        simpler = self._value(node)
        if simpler is not None:
            (made,) = node.outputs
            assert made is not None
            self.same[made] = simpler
            return
        for each in self._operators(node):
            self.nodes.append(each)
            self.maker.update((ref, each) for ref in each.outputs if ref is not None)

    def _value(self, node: Node) -> Ref | None:
        """An earlier value that a node makes again."""
        for rule in (self._power_of_one, self._update_added):
            found = rule(node)
            if found is not None and self._alike(node, found):
                return found
        return None

    def _alike(self, node: Node, ref: Ref) -> bool:
        (made,) = node.outputs
        return made is not None and self.metas[made.id] == self.metas[ref.id]

    def _power_of_one(self, node: Node) -> Any:
        return self._match((aten.pow.Tensor_Scalar, "x", 1), node, "x")

    def _update_added(self, node: Node) -> Any:
        """`p + (new - p)`, where an optimiser has computed the new parameter."""
        found = self._match(
            (aten.add.Tensor, "p", (aten.sub.Tensor, "new", "p")), node, "new"
        )
        maker = self.maker.get(found)
        return found if maker is not None and updates(maker.op) else None

    def _match(self, pattern: Any, node: Node, name: str) -> Any:
        binding: dict[str, Any] = {}
        matched = _matches(pattern, node, self.maker, binding)
        return binding[name] if matched else None

    def _operators(self, node: Node) -> tuple[Node, ...]:
        """The node, or what takes its place."""
        for rule in (self._fused, self._before_expansion):
            found = rule(node)
            if found is not None:
                return found
        return (node,)

    def _fused(self, node: Node) -> tuple[Node, ...] | None:
        for pattern, op, names in _FUSED:
            binding: dict[str, Any] = {}
            if _matches(pattern, node, self.maker, binding):
                args = tuple(binding[name] for name in names)
                if self._of_one_shape((*args, *node.outputs)):
                    return (replace(node, op=op, args=args),)
        return None

    def _of_one_shape(self, values: Iterable[Any]) -> bool:
        return len({self.metas[ref.id].shape for ref in values}) == 1

    def _before_expansion(self, node: Node) -> tuple[Node, ...] | None:
        """An operator on the elements that an expansion repeats, done before it."""
        operands = list(refs((node.args, node.kwargs)))
        single = len(operands) == len(node.outputs) == 1
        if not single or not is_elementwise(node.op):
            return None
        expansion = self.maker.get(operands[0])
        if expansion is None or expansion.op is not aten.expand.default:
            return None
        small, (made,) = expansion.args[0], node.outputs
        assert made is not None
        few, many = self.metas[small.id], self.metas[operands[0].id]
        if few.numel * 2 > many.numel or len(few.shape) != len(many.shape):
            return None
        dtype = self.metas[made.id].dtype
        ref = self._new(replace(few, dtype=dtype))
        self.metas[made.id] = replace(many, dtype=dtype)
        args, kwargs = map_leaves(
            lambda leaf: small if leaf == operands[0] else leaf,
            (node.args, node.kwargs),
        )
        first = replace(node, args=args, kwargs=kwargs, outputs=(ref,))
        args = (ref, *expansion.args[1:])
        return first, replace(expansion, args=args, outputs=node.outputs)

    def _new(self, meta: Meta) -> Ref:
        ref = Ref(next(self.fresh))
        self.metas[ref.id] = meta
        return ref


# --- patterns -------------------------------------------------------------------------


def _matches(
    pattern: Any, found: Any, maker: Mapping[Ref, Node], binding: dict[str, Any]
) -> bool:
    """Whether a node or an argument has the form of a pattern.

    A name stands for any value, the same wherever it stands; a tuple for an operator
    and its arguments; dots for anything.
    """
    if pattern is ...:
        return True
    if isinstance(pattern, str):
        return binding.setdefault(pattern, found) == found and isinstance(found, Ref)
    if not isinstance(pattern, tuple):
        return not isinstance(found, Ref) and found == pattern
    node = maker.get(found) if isinstance(found, Ref) else found
    if not isinstance(node, Node) or node.op is not pattern[0]:
        return False
    if len(node.args) != len(pattern) - 1 or not node.kwargs.keys() <= _OPTIONS:
        return False
    pairs = zip(pattern[1:], node.args, strict=True)
    return all(_matches(each, arg, maker, binding) for each, arg in pairs)


_OPTIONS = {"dtype", "layout", "device", "pin_memory"}  # of what makes a constant
_ONE = (aten.full.default, ..., 1)
_SIGMOID = (aten.sigmoid.default, "x")
_FUSED: list[tuple[Any, Any, tuple[str, ...]]] = [
    (
        (
            aten.mul.Tensor,
            (aten.mul.Tensor, "grad", _SIGMOID),
            (
                aten.add.Scalar,
                (aten.mul.Tensor, "x", (aten.sub.Tensor, _ONE, _SIGMOID)),
                1,
            ),
        ),
        aten.silu_backward.default,
        ("grad", "x"),
    ),
]
