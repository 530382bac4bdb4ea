"""The table of operators: one line a rule, each a pattern of factors.

An operator that is not here, or whose call does not fit its pattern, is computed whole
on gathered operands: slower, and right. So a rule may only be added where it holds for
every call that its pattern fits; the tests compare each with the unsharded operator.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._layout import Meta
from ._sharding import Dim, Sharding, parse, reshape_factors, sharding, summed
from ._torch import schema
from ._trace import Node, Ref

aten = torch.ops.aten


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
                default = argument.default_value if argument.has_default_value() else None
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


def find(site: Site) -> Sharding | None:
    """The sharding of a call, or None if it must be computed whole."""
    rule = RULES.get(site.node.op)
    if rule is None and torch.Tag.pointwise in site.node.op.tags:
        rule = pointwise
    return rule(site) if rule else None


# --- rules by kind --------------------------------------------------------------------


def pattern(text: str, **options: Any) -> Rule:
    """An operator with dimensions known by position; what disappears is summed."""
    inputs, outputs = parse(text)

    def rule(site: Site) -> Sharding | None:
        found = site.make(inputs, outputs, **options)
        return _reducing(found, "sum")

    return rule


def _reducing(found: Sharding | None, op: str) -> Sharding | None:
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
    return site.make(inputs, outputs, linear=_linear_sets(site))


def along(argument: str) -> Rule:
    """Works along the dimensions that an argument names, alike on all others."""

    def rule(site: Site) -> Sharding | None:
        rank = len(site.inputs[0].shape)
        whole = normal(site.arg(argument), rank)
        inputs = [names(m.shape, whole, "i") for m in site.inputs]
        outputs = [m and names(m.shape, whole, "o") for m in site.outputs]
        return site.make(inputs, outputs, linear=LINEAR.get(site.node.op, ()))

    return rule


def reduction(op: str | None, argument: str | None = "dim") -> Rule:
    """Reduces dimensions; with `op` None they must be whole."""

    def rule(site: Site) -> Sharding | None:
        (source,) = site.inputs
        rank = len(source.shape)
        dims = normal(site.arg(argument) if argument else None, rank)
        keep = bool(_optional(site, "keepdim"))
        inputs = names(source.shape, () if op else dims)
        kept = [() if d in dims else inputs[d] for d in range(rank)]
        left = kept if keep else [k for d, k in enumerate(kept) if d not in dims]
        linear = (frozenset({0}),) if op == "sum" and _keeps_precision(site) else ()
        found = site.make([inputs], [left for _ in site.outputs], linear=linear)
        return _reducing(found, op) if op else found

    return rule


def matrices(trailing: int) -> Rule:
    """Works on the last dimensions, alike on all leading ones."""

    def rule(site: Site) -> Sharding | None:
        def spell(meta: Meta, tag: str) -> list[str]:
            rank = len(meta.shape)
            return names(meta.shape, range(max(rank - trailing, 0), rank), tag)

        metas = enumerate(site.inputs)
        inputs = [spell(m, f"i{n}") for n, m in metas]
        outputs = [m and spell(m, f"o{n}") for n, m in enumerate(site.outputs)]
        return site.make(inputs, outputs, linear=LINEAR.get(site.node.op, ()))

    return rule


def _optional(site: Site, name: str) -> Any:
    try:
        return site.arg(name)
    except KeyError:
        return None


# --- linear operators -----------------------------------------------------------------

_FIRST = (frozenset({0}),)
_BOTH = (frozenset({0, 1}),)
_EITHER = (frozenset({0}), frozenset({1}))

LINEAR: dict[Any, tuple[frozenset[int], ...]] = {
    aten.add.Tensor: _BOTH,
    aten.sub.Tensor: _BOTH,
    aten.rsub.Tensor: _BOTH,
    aten.mul.Tensor: _EITHER,
    aten.mul.Scalar: _FIRST,
    aten.div.Tensor: _FIRST,
    aten.div.Scalar: _FIRST,
    aten.neg.default: _FIRST,
    aten.clone.default: _FIRST,
    aten._to_copy.default: _FIRST,
    aten.tril.default: _FIRST,
    aten.triu.default: _FIRST,
    aten.where.self: (frozenset({1, 2}),),
}


def _linear_sets(site: Site) -> tuple[frozenset[int], ...]:
    sets = LINEAR.get(site.node.op, ())
    operands = sum(isinstance(a, Ref) for a in site.node.args)
    if sets and _keeps_precision(site) and operands == max(max(s) for s in sets) + 1:
        return sets
    if operands == 1 and site.node.op in (aten.mul.Tensor, aten.div.Tensor):
        return _FIRST if _keeps_precision(site) else ()
    return ()


def _keeps_precision(site: Site) -> bool:
    """Whether rounding each rank's part costs nothing against rounding the sum."""
    result = site.outputs[0]
    assert result is not None
    return all(
        torch.promote_types(m.dtype, result.dtype) == result.dtype
        and (result.dtype.is_floating_point or not m.dtype.is_floating_point)
        and m.dtype != torch.bool
        for m in site.inputs
        if m.shape or len(site.inputs) == 1
    )


# --- views ----------------------------------------------------------------------------


def reshape(site: Site) -> Sharding | None:
    """Reshapes: the common factors of both shapes."""
    (source,), (target,) = site.inputs, site.outputs
    assert target is not None
    found = reshape_factors(source.shape, target.shape)
    if found is None:
        return None
    inputs, outputs, sizes = found
    return site.make(
        [inputs], [outputs], sizes=sizes, linear=_FIRST, shape_argument=1
    )


def squeezes(site: Site) -> Sharding | None:
    """Dimensions of length one appear or disappear."""
    (source,), (target,) = site.inputs, site.outputs
    assert target is not None
    found = reshape_factors(source.shape, target.shape)
    if found is None:
        return None
    inputs, outputs, sizes = found
    return site.make([inputs], [outputs], sizes=sizes, linear=_FIRST)


def permuted(order: Callable[[Site, int], list[int]]) -> Rule:
    """The dimensions of the operand in another order."""

    def rule(site: Site) -> Sharding | None:
        source = names(site.inputs[0].shape)
        target = [source[d] for d in order(site, len(source))]
        return site.make([source], [target], linear=_FIRST)

    return rule


def _transposed(site: Site, rank: int) -> list[int]:
    order = list(range(rank))
    first, second = site.arg("dim0") % rank, site.arg("dim1") % rank
    order[first], order[second] = order[second], order[first]
    return order


def expand(site: Site) -> Sharding | None:
    """Broadcasts to a larger shape; what is new may be split in the result."""
    (source,), (target,) = site.inputs, site.outputs
    assert target is not None
    inputs = broadcast(source.shape, target.shape)
    return site.make(
        [inputs], [names(target.shape)], linear=_FIRST, shape_argument=1
    )


def repeat(site: Site) -> Sharding | None:
    """Tiles: dimensions that are not repeated stay as they are."""
    (source,), (target,) = site.inputs, site.outputs
    assert target is not None
    offset = len(target.shape) - len(source.shape)
    whole = [d for d, n in enumerate(site.arg("repeats")) if n != 1]
    outputs = names(target.shape, whole, "o")
    inputs = names(target.shape, whole, "i")[offset:]
    return site.make([inputs], [outputs], linear=_FIRST)


def slices(site: Site) -> Sharding | None:
    """A part of one dimension; nothing changes if it is all of it."""
    source, target = site.inputs[0], site.outputs[0]
    assert target is not None
    dim = site.arg("dim") % len(source.shape)
    cut = [dim] if source.shape != target.shape else []
    inputs, outputs = names(source.shape, cut, "i"), names(target.shape, cut, "o")
    return site.make([inputs], [outputs], linear=_FIRST)


def select(site: Site) -> Sharding | None:
    """One element of a dimension."""
    dim = site.arg("dim") % len(site.inputs[0].shape)
    inputs = names(site.inputs[0].shape, [dim])
    outputs = [f for d, f in enumerate(inputs) if d != dim]
    return site.make([inputs], [outputs], linear=_FIRST)


def unbind(site: Site) -> Sharding | None:
    """All elements of a dimension, each a result."""
    dim = site.arg("dim") % len(site.inputs[0].shape)
    inputs = names(site.inputs[0].shape, [dim])
    outputs = [f for d, f in enumerate(inputs) if d != dim]
    return site.make([inputs], [outputs] * len(site.outputs), linear=_FIRST)


def split(site: Site) -> Sharding | None:
    """Consecutive parts of a dimension, each a result."""
    dim = site.arg("dim") % len(site.inputs[0].shape)
    inputs = names(site.inputs[0].shape, [dim])
    outputs = [m and names(m.shape, [dim], f"o{n}") for n, m in enumerate(site.outputs)]
    return site.make([inputs], outputs, linear=_FIRST)


def select_backward(site: Site) -> Sharding | None:
    """Gradient of `select`: zeros but for one element of a dimension."""
    (target,) = site.outputs
    assert target is not None
    dim = site.arg("dim") % len(target.shape)
    outputs = names(target.shape, [dim])
    inputs = [f for d, f in enumerate(outputs) if d != dim]
    return site.make([inputs], [outputs], linear=_FIRST, shape_argument=1)


def slice_backward(site: Site) -> Sharding | None:
    """Gradient of `slice`: zeros around a part of a dimension."""
    (source,), (target,) = site.inputs, site.outputs
    assert target is not None
    dim = site.arg("dim") % len(target.shape)
    cut = [dim] if source.shape != target.shape else []
    inputs, outputs = names(source.shape, cut, "i"), names(target.shape, cut, "o")
    return site.make([inputs], [outputs], linear=_FIRST, shape_argument=1)


def slice_scatter(site: Site) -> Sharding | None:
    """A part of one dimension replaced."""
    source, part = site.inputs
    dim = site.arg("dim") % len(source.shape)
    cut = [dim] if source.shape != part.shape else []
    whole = names(source.shape, cut, "i")
    replaced = names(part.shape, cut, "p")
    return site.make([whole, replaced], [whole], linear=_BOTH)


def select_scatter(site: Site) -> Sharding | None:
    """One element of a dimension replaced."""
    dim = site.arg("dim") % len(site.inputs[0].shape)
    whole = names(site.inputs[0].shape, [dim])
    replaced = [f for d, f in enumerate(whole) if d != dim]
    return site.make([whole, replaced], [whole], linear=_BOTH)


def diagonal(site: Site) -> Sharding | None:
    """The diagonal of two dimensions, as a new last one."""
    rank = len(site.inputs[0].shape)
    dims = [site.arg("dim1") % rank, site.arg("dim2") % rank]
    inputs = names(site.inputs[0].shape, dims)
    outputs = [f for d, f in enumerate(inputs) if d not in dims] + ["diagonal!"]
    return site.make([inputs], [outputs], linear=_FIRST)


def cat(site: Site) -> Sharding | None:
    """Concatenation along one dimension."""
    (target,) = site.outputs
    assert target is not None
    if any(len(m.shape) != len(target.shape) for m in site.inputs):
        return None
    dim = site.arg("dim") % len(target.shape)
    inputs = [names(m.shape, [dim], f"i{n}") for n, m in enumerate(site.inputs)]
    together = (frozenset(range(len(inputs))),)
    return site.make(inputs, [names(target.shape, [dim], "o")], linear=together)


def stack(site: Site) -> Sharding | None:
    """Equal operands along a new dimension."""
    (target,) = site.outputs
    assert target is not None
    dim = site.arg("dim") % len(target.shape)
    outputs = names(target.shape, [dim])
    inputs = [f for d, f in enumerate(outputs) if d != dim]
    together = (frozenset(range(len(site.inputs))),)
    return site.make([inputs] * len(site.inputs), [outputs], linear=together)


def pad(site: Site) -> Sharding | None:
    """Padding; dimensions that are not padded stay as they are."""
    (source,), (target,) = site.inputs, site.outputs
    assert target is not None
    pairs = zip(source.shape, target.shape, strict=True)
    changed = [d for d, (n, m) in enumerate(pairs) if n != m]
    amounts = site.arg("pad")
    rank = len(source.shape)
    changed += [rank - 1 - k // 2 for k, n in enumerate(amounts) if n]
    inputs, outputs = names(source.shape, changed, "i"), names(target.shape, changed, "o")
    return site.make([inputs], [outputs])


# --- lookups --------------------------------------------------------------------------


def embedding(site: Site) -> Sharding | None:
    """Rows of a table: the table's rows stay whole, the indices may be split."""
    index = names(site.inputs[1].shape)
    return site.make([["v!", "e"], index], [[*index, "e"]])


def embedding_backward(site: Site) -> Sharding | None:
    """Sums of gradients for each row of a table."""
    if site.arg("scale_grad_by_freq"):
        return None
    index = names(site.inputs[1].shape)
    found = site.make([[*index, "e"], index], [["v!", "e"]])
    return _reducing(found, "sum")


def gather(site: Site) -> Sharding | None:
    """Elements along a dimension; others match where they are equally long."""
    source, index = site.inputs
    if len(source.shape) != len(index.shape) or not source.shape:
        return None
    whole = _indexed_dims(site)
    inputs = [names(source.shape, whole, "i"), names(index.shape, whole, "o")]
    return site.make(inputs, [names(index.shape, whole, "o")])


def scatter(site: Site) -> Sharding | None:
    """Writes elements along a dimension; others match where they are equally long."""
    ranks = {len(m.shape) for m in site.inputs}
    if len(ranks) != 1 or not site.inputs[0].shape:
        return None
    whole = _indexed_dims(site)
    inputs = [names(m.shape, whole, f"i{n}") for n, m in enumerate(site.inputs)]
    return site.make(inputs, [inputs[0]])


def _indexed_dims(site: Site) -> list[int]:
    dim = site.arg("dim") % len(site.inputs[0].shape)
    shapes = zip(*(m.shape for m in site.inputs), strict=True)
    unequal = [d for d, lengths in enumerate(shapes) if len(set(lengths)) > 1]
    return [dim, *unequal]


def index_select(site: Site) -> Sharding | None:
    """Slices of a dimension at the given indices."""
    dim = site.arg("dim") % len(site.inputs[0].shape)
    source = names(site.inputs[0].shape, [dim])
    target = [f if d != dim else "i" for d, f in enumerate(source)]
    return site.make([source, ["i"] * len(site.inputs[1].shape)], [target])


def index_add(site: Site) -> Sharding | None:
    """Adds slices to a dimension at the given indices."""
    dim = site.arg("dim") % len(site.inputs[0].shape)
    source = names(site.inputs[0].shape, [dim])
    part = [f if d != dim else "i" for d, f in enumerate(source)]
    found = site.make([source, ["i"], part], [source], addend=frozenset({0}))
    return _reducing(found, "sum")


def _index_layout(site: Site) -> tuple[list[str], list[list[Dim]], list[Any]] | None:
    """Factors of source, indices and result of advanced indexing."""
    source = site.inputs[0].shape
    indices = list(site.arg("indices"))
    indices += [None] * (len(source) - len(indices))
    used = [d for d, index in enumerate(indices) if index is not None]
    count = len(used)
    metas = site.inputs[1 : 1 + count]
    if not used or any(m.dtype == torch.bool for m in metas):
        return None
    shape = torch.broadcast_shapes(*(m.shape for m in metas))
    spelled = [f"i{d}" for d in range(len(shape))]
    positions = [
        [(f"i{d[0][1:]}",) if d else () for d in broadcast(m.shape, shape)]
        for m in metas
    ]
    dims = names(source, used)
    rest = [f for d, f in enumerate(dims) if d not in used]
    adjacent = used == list(range(used[0], used[-1] + 1))
    at = used[0] if adjacent else 0
    return dims, positions, rest[:at] + spelled + rest[at:]


def index(site: Site) -> Sharding | None:
    """Advanced indexing: indexed dimensions stay whole, indices may be split."""
    layout = _index_layout(site)
    if layout is None:
        return None
    dims, positions, target = layout
    return site.make([dims, *positions], [target])


def index_put(site: Site) -> Sharding | None:
    """Advanced assignment; where it adds up, the indices may be split."""
    layout = _index_layout(site)
    if layout is None:
        return None
    dims, positions, target = layout
    shape = [_length(site, f, dims, positions) for f in target]
    values = [
        tuple(target[int(f[1:])] for f in factors)
        for factors in broadcast(site.inputs[-1].shape, shape)
    ]
    if site.arg("accumulate"):
        inputs = [dims, *positions, values]
        found = site.make(inputs, [dims], addend=frozenset({0}))
        return _reducing(found, "sum")
    return site.make(
        [dims, *[[_bang(d) for d in p] for p in positions], [_bang(d) for d in values]],
        [dims],
    )


def _bang(factors: Dim) -> Dim:
    """Indices must be whole; factors of the source's own dimensions need not be."""
    return tuple(f"{f}!" if f.startswith("i") else f for f in factors)


def _length(
    site: Site, factor: str, dims: list[str], positions: list[list[Dim]]
) -> int:
    if factor in dims:
        return site.inputs[0].shape[dims.index(factor)]
    lengths = [
        m.shape[p.index((factor,))]
        for m, p in zip(site.inputs[1:], positions, strict=False)
        if (factor,) in p
    ]
    return lengths[0] if lengths else 1


# --- layers ---------------------------------------------------------------------------


def layer_norm(site: Site) -> Sharding | None:
    """Normalises trailing dimensions; also its root-mean-square form."""
    trailing = len(site.arg("normalized_shape"))
    lead = len(site.inputs[0].shape) - trailing
    first, *weights = site.inputs
    rank = len(first.shape)
    inputs = [names(first.shape, range(lead, rank))]
    inputs += [[f"w{d}!" for d in range(lead, rank)] for _ in weights]
    statistics = [*(f"d{d}" for d in range(lead)), *[()] * trailing]
    outputs = [inputs[0], *[statistics] * (len(site.outputs) - 1)]
    return site.make(inputs, outputs)


def layer_norm_backward(site: Site) -> Sharding | None:
    """Gradients of a normalisation; those of its weights are sums over the rest."""
    shape = site.arg("input_shape" if _has(site, "input_shape") else "normalized_shape")
    trailing = len(shape)
    rank = len(site.inputs[0].shape)
    lead = rank - trailing
    full = names(site.inputs[0].shape, range(lead, rank))
    weights = full[lead:]
    statistics = [*full[:lead], *[()] * trailing]
    spell = {rank: full, trailing: weights}
    inputs = [
        statistics if _is_statistic(m.shape, lead, trailing) else spell[len(m.shape)]
        for m in site.inputs
    ]
    outputs = [m and (full if len(m.shape) == rank else weights) for m in site.outputs]
    return _reducing(site.make(inputs, outputs), "sum") if lead else None


def _has(site: Site, name: str) -> bool:
    return any(argument.name == name for argument in schema(site.node.op).arguments)


def _is_statistic(shape: Sequence[int], lead: int, trailing: int) -> bool:
    return len(shape) == lead + trailing and all(n == 1 for n in shape[lead:])


def attention(site: Site) -> Sharding | None:
    """Fused attention: batch and heads may be split, positions not."""
    spelled = [_attention_dims(site, m, n) for n, m in enumerate(site.inputs)]
    outputs = [m and _attention_dims(site, m, -n - 1) for n, m in enumerate(site.outputs)]
    return site.make(spelled, outputs)


def _attention_dims(site: Site, meta: Meta, tag: int) -> list[Any]:
    batch, heads = site.inputs[0].shape[:2]
    shape = meta.shape
    if len(shape) not in (3, 4):
        return [f"x{tag}.{d}!" for d in range(len(shape))]
    rest = [f"x{tag}.{d}!" for d in range(2, len(shape))]
    first: Any = "b" if shape[0] == batch else ()
    second: Any = "h" if shape[1] == heads else () if shape[1] == 1 else f"x{tag}.1!"
    return [first, second, *rest]


def convolution(site: Site) -> Sharding | None:
    """Convolution: samples may be split."""
    inputs = [_channels(m, n) for n, m in enumerate(site.inputs)]
    (target,) = site.outputs
    assert target is not None
    inputs[0][0] = "n"
    return site.make(inputs, [["n", *_channels(target, 9)[1:]]])


def convolution_backward(site: Site) -> Sharding | None:
    """Gradients of a convolution; those of its weights are sums over samples."""
    inputs = [_channels(m, n) for n, m in enumerate(site.inputs)]
    inputs[0][0] = inputs[1][0] = "n"
    outputs = [m and _channels(m, n + 3) for n, m in enumerate(site.outputs)]
    if outputs[0]:
        outputs[0][0] = "n"
    return _reducing(site.make(inputs, outputs), "sum")


def _channels(meta: Meta, tag: int) -> list[str]:
    return [f"x{tag}.{d}!" for d in range(len(meta.shape))]


def fused_optimiser(site: Site) -> Sharding | None:
    """Lists of leaves, each elementwise with its moments; steps and rate are whole."""
    count = len(site.arg("self"))
    leaves = site.inputs[:count]
    mirrors = [m.shape == leaves[n % count].shape for n, m in enumerate(site.inputs)]
    inputs = [
        _leaf_dims(m, n % count) if mirrors[n] else _leaf_dims(m, n % count, "!")
        for n, m in enumerate(site.inputs)
    ]
    outputs = [m and _leaf_dims(m, n % count) for n, m in enumerate(site.outputs)]
    bundle = tuple(
        (tuple(range(n, len(inputs), count)), tuple(range(n, len(outputs), count)))
        for n in range(count)
    )
    return site.make(inputs, outputs, bundle=bundle)


def _leaf_dims(meta: Meta, leaf: int, mark: str = "") -> list[str]:
    return [f"l{leaf}.{d}{mark}" for d in range(len(meta.shape))]


# --- constants ------------------------------------------------------------------------


def filled(argument: str) -> Rule:
    """A constant of one value: any part of it can be made alone."""

    def rule(site: Site) -> Sharding | None:
        (target,) = site.outputs
        assert target is not None
        position = site.position(argument)
        return site.make([], [names(target.shape)], shape_argument=position)

    return rule


# --- the table ------------------------------------------------------------------------

RULES: dict[Any, Rule] = {
    # matrix products
    aten.mm.default: pattern("m k, k n -> m n"),
    aten.bmm.default: pattern("b m k, b k n -> b m n"),
    aten.mv.default: pattern("m k, k -> m"),
    aten.dot.default: pattern("k, k ->"),
    aten.vdot.default: pattern("k, k ->"),
    aten.addmm.default: lambda site: _added_product(site, "m n", "m k, k n"),
    aten.baddbmm.default: lambda site: _added_product(site, "b m n", "b m k, b k n"),
    # elementwise operators that torch does not mark as such
    **dict.fromkeys(
        (
            aten.clone.default,
            aten._to_copy.default,
            aten.where.self,
            aten.masked_fill.Scalar,
            aten.masked_fill.Tensor,
            aten.gelu_backward.default,
            aten.lerp.Tensor,
            aten.copy.default,
        ),
        pointwise,
    ),
    # views
    aten.view.default: reshape,
    aten._unsafe_view.default: reshape,
    aten.reshape.default: reshape,
    aten._reshape_copy.default: reshape,
    aten.unsqueeze.default: squeezes,
    aten.squeeze.default: squeezes,
    aten.squeeze.dim: squeezes,
    aten.squeeze.dims: squeezes,
    aten.permute.default: permuted(
        lambda site, rank: [d % rank for d in site.arg("dims")]
    ),
    aten.transpose.int: permuted(_transposed),
    aten.t.default: permuted(lambda site, rank: list(reversed(range(rank)))),
    aten.expand.default: expand,
    aten.repeat.default: repeat,
    aten.slice.Tensor: slices,
    aten.select.int: select,
    aten.unbind.int: unbind,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split,
    aten.diagonal.default: diagonal,
    aten.select_backward.default: select_backward,
    aten.slice_backward.default: slice_backward,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.constant_pad_nd.default: pad,
    aten.view_as_real.default: lambda site: site.make(
        [names(site.inputs[0].shape)], [[*names(site.inputs[0].shape), "c!"]]
    ),
    aten.view_as_complex.default: lambda site: site.make(
        [[*names(site.inputs[0].shape)[:-1], "c!"]],
        [names(site.inputs[0].shape)[:-1]],
    ),
    # reductions
    aten.sum.default: reduction("sum", None),
    aten.sum.dim_IntList: reduction("sum"),
    aten.amax.default: reduction("max"),
    aten.amin.default: reduction("min"),
    aten.any.default: reduction("max", None),
    aten.any.dim: reduction("max"),
    aten.any.dims: reduction("max"),
    aten.all.default: reduction("min", None),
    aten.all.dim: reduction("min"),
    aten.all.dims: reduction("min"),
    aten.prod.dim_int: reduction(None),
    aten.logsumexp.default: reduction(None),
    aten.max.dim: reduction(None),
    aten.min.dim: reduction(None),
    aten.argmax.default: reduction(None),
    aten.argmin.default: reduction(None),
    aten.linalg_vector_norm.default: reduction(None),
    # along one dimension
    aten._softmax.default: along("dim"),
    aten._log_softmax.default: along("dim"),
    aten._softmax_backward_data.default: along("dim"),
    aten._log_softmax_backward_data.default: along("dim"),
    aten.cumsum.default: along("dim"),
    aten.cumprod.default: along("dim"),
    aten.logcumsumexp.default: along("dim"),
    aten.sort.default: along("dim"),
    aten.sort.stable: along("dim"),
    aten.topk.default: along("dim"),
    aten.flip.default: along("dims"),
    # on the last two dimensions
    aten.tril.default: matrices(2),
    aten.triu.default: matrices(2),
    # lookups
    aten.embedding.default: embedding,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.gather.default: gather,
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter_add.default: scatter,
    aten.index_select.default: index_select,
    aten.index_add.default: index_add,
    aten.index.Tensor: index,
    aten.index_put.default: index_put,
    # layers
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten._fused_rms_norm.default: layer_norm,
    aten._fused_rms_norm_backward.default: layer_norm_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    # optimisers
    aten._fused_adamw.default: fused_optimiser,
    aten._fused_adamw.tensor_lr: fused_optimiser,
    aten._fused_adam.default: fused_optimiser,
    aten._fused_adam.tensor_lr: fused_optimiser,
    # constants
    aten.full.default: filled("size"),
    aten.zeros.default: filled("size"),
    aten.ones.default: filled("size"),
    aten.empty.memory_format: filled("size"),
}


def _added_product(site: Site, bias: str, product: str) -> Sharding | None:
    """A product added to a bias that is broadcast to it."""
    (target,) = site.outputs
    assert target is not None
    left, right = (side.split() for side in product.split(","))
    letters = bias.split()
    spelled = [
        tuple(letters[int(f[1:])] for f in factors)
        for factors in broadcast(site.inputs[0].shape, target.shape)
    ]
    found = site.make([spelled, left, right], [letters], addend=frozenset({0}))
    return _reducing(found, "sum")
