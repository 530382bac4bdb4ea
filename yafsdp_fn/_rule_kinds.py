"""Kinds of sharding rules that operators share, and where sums may stay pending."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._graph import Node, Ref
from ._layout import Meta
from ._sharding import Dim, Sharding, parse, sharding, summed
from ._torch import schema

aten = torch.ops.aten
Linear = tuple[frozenset[int], ...]

# --- one call -------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """One operator of a graph together with what is known of its values."""

    node: Node
    inputs: tuple[Meta, ...]
    outputs: tuple[Meta | None, ...]

    def arg(self, name: str) -> Any:
        """An argument by the name that the operator's schema gives it."""
        for position, argument in enumerate(schema(self.node.op).arguments):
            if argument.name == name:
                if position < len(self.node.args):
                    return self.node.args[position]
                default = (
                    argument.default_value if argument.has_default_value() else None
                )
                return self.node.kwargs.get(name, default)
        raise KeyError(name)

    def position(self, name: str) -> int:
        """The position of an argument in the schema."""
        names = [argument.name for argument in schema(self.node.op).arguments]
        return names.index(name)

    def make(
        self, inputs: Sequence[Any], outputs: Sequence[Any], **options: Any
    ) -> Sharding | None:
        """A `Sharding` of this call."""
        if len(inputs) != len(self.inputs) or len(outputs) != len(self.outputs):
            return None
        return sharding(inputs, outputs, self.inputs, self.outputs, **options)


Rule = Callable[[Site], Sharding | None]


# --- linear operators -----------------------------------------------------------------

FIRST = (frozenset({0}),)
BOTH = (frozenset({0, 1}),)
EITHER = (frozenset({0}), frozenset({1}))

LINEAR: dict[Any, Linear] = {
    aten.add.Tensor: BOTH,
    aten.sub.Tensor: BOTH,
    aten.rsub.Tensor: BOTH,
    aten.mul.Tensor: EITHER,
    aten.mul.Scalar: FIRST,
    aten.div.Tensor: FIRST,
    aten.div.Scalar: FIRST,
    aten.neg.default: FIRST,
    aten.clone.default: FIRST,
    aten._to_copy.default: FIRST,
    aten.tril.default: FIRST,
    aten.triu.default: FIRST,
    aten.where.self: (frozenset({1, 2}),),
}


def linear_sets(site: Site) -> Linear:
    """The sets of operands in which this call is linear.

    Adding a number is not: a set counts only if all of it are tensors.
    """
    if not keeps_precision(site):
        return ()
    operands = sum(isinstance(argument, Ref) for argument in site.node.args)
    return tuple(s for s in LINEAR.get(site.node.op, ()) if max(s) < operands)


def keeps_precision(site: Site) -> bool:
    """Whether rounding each rank's part costs nothing against rounding the sum."""
    result = site.outputs[0]
    assert result is not None
    return all(
        m.dtype == result.dtype or _widens(m.dtype, result.dtype)
        for m in site.inputs
        if m.shape or len(site.inputs) == 1
    )


def _widens(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a conversion rounds nothing that a later sum would not round."""
    unsigned = {torch.uint16, torch.uint32, torch.uint64}  # torch promotes none of them
    narrow = before == torch.bool or min(before.itemsize, after.itemsize) == 1
    if narrow or unsigned & {before, after}:
        return False
    exact = torch.promote_types(before, after) == after
    return exact and (after.is_floating_point or not before.is_floating_point)


# --- kinds of rules ------------------------------------------------------------------


def pattern(text: str, **options: Any) -> Rule:
    """An operator with dimensions known by position; what disappears is summed."""
    inputs, outputs = parse(text)

    def rule(site: Site) -> Sharding | None:
        found = site.make(inputs, outputs, **options)
        return reducing(found, "sum")

    return rule


def reducing(found: Sharding | None, op: str) -> Sharding | None:
    if found is None:
        return None
    reduce = {f: op for f in summed(found.inputs, found.outputs) - found.whole}
    return Sharding(**{**vars(found), "reduce": reduce})


def names(shape: Sequence[int], whole: Iterable[int] = (), tag: str = "") -> list[str]:
    """A factor for every dimension; those in `whole` stay whole, apart by `tag`."""
    kept = set(whole)
    return [f"w{d}{tag}!" if d in kept else f"d{d}" for d in range(len(shape))]


def normal(dims: Any, rank: int) -> list[int]:
    """Dimensions counted from the front; `None` and `[]` mean all of them."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return [d % max(rank, 1) for d in listed]


def broadcast(shape: Sequence[int], target: Sequence[int]) -> list[Dim]:
    """Factors of an operand that is broadcast to `target` (named d0, d1, ...)."""
    offset = len(target) - len(shape)
    return [
        () if n == 1 and target[d + offset] != 1 else (f"d{d + offset}",)
        for d, n in enumerate(shape)
    ]


def pointwise(site: Site) -> Sharding | None:
    """Elementwise operators, operands broadcast against the result."""
    first = site.outputs[0]
    if first is None or any(len(m.shape) > len(first.shape) for m in site.inputs):
        return None
    inputs = [broadcast(m.shape, first.shape) for m in site.inputs]
    outputs = [m and names(m.shape) for m in site.outputs]
    return site.make(inputs, outputs, linear=linear_sets(site))


def along(argument: str) -> Rule:
    """Works along the dimensions that an argument names, alike on all others."""

    def rule(site: Site) -> Sharding | None:
        rank = len(site.inputs[0].shape)
        whole = normal(site.arg(argument), rank)
        inputs = [names(m.shape, whole, "i") for m in site.inputs]
        outputs = [m and names(m.shape, whole, "o") for m in site.outputs]
        return site.make(inputs, outputs, linear=linear_sets(site))

    return rule


def reduction(op: str | None, argument: str | None = "dim") -> Rule:
    """Reduces dimensions; with `op` None they must be whole."""

    def rule(site: Site) -> Sharding | None:
        (source,) = site.inputs
        rank = len(source.shape)
        dims = normal(site.arg(argument) if argument else None, rank)
        keep = bool(optional(site, "keepdim"))
        inputs = names(source.shape, () if op else dims)
        kept = [() if d in dims else inputs[d] for d in range(rank)]
        left = kept if keep else [k for d, k in enumerate(kept) if d not in dims]
        linear = (frozenset({0}),) if op == "sum" and keeps_precision(site) else ()
        found = site.make([inputs], [left for _ in site.outputs], linear=linear)
        return reducing(found, op) if op else found

    return rule


def matrices(trailing: int, shape: str | None = None) -> Rule:
    """Works on the last dimensions, alike on all leading ones.

    `shape` names the argument that holds the result's shape, if there is one.
    """

    def rule(site: Site) -> Sharding | None:
        def spell(meta: Meta, tag: str) -> list[str]:
            rank = len(meta.shape)
            return names(meta.shape, range(max(rank - trailing, 0), rank), tag)

        metas = enumerate(site.inputs)
        inputs = [spell(m, f"i{n}") for n, m in metas]
        outputs = [m and spell(m, f"o{n}") for n, m in enumerate(site.outputs)]
        position = site.position(shape) if shape else None
        linear = linear_sets(site)
        return site.make(inputs, outputs, linear=linear, shape_argument=position)

    return rule


def optional(site: Site, name: str) -> Any:
    try:
        return site.arg(name)
    except KeyError:
        return None


def filled(argument: str) -> Rule:
    """A constant of one value: any part of it can be made alone."""

    def rule(site: Site) -> Sharding | None:
        (target,) = site.outputs
        assert target is not None
        position = site.position(argument)
        return site.make([], [names(target.shape)], shape_argument=position)

    return rule
