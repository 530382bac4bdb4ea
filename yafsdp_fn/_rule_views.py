"""Sharding rules of operators that only move elements: views, slices, joins."""

from collections.abc import Callable

from ._rule_kinds import BOTH, FIRST, Rule, Site, broadcast, names, normal
from ._sharding import Dim, Sharding, reshape_factors


def reshape(site: Site) -> Sharding | None:
    """Reshapes: the common factors of both shapes."""
    (source,), (target,) = site.inputs, site.outputs
    assert target is not None
    found = reshape_factors(source.shape, target.shape)
    if found is None:
        return None
    inputs, outputs, sizes = found
    return site.make([inputs], [outputs], sizes=sizes, linear=FIRST, shape_argument=1)


def unsqueeze(site: Site) -> Sharding | None:
    """A new dimension of length one."""
    inputs: list[str | Dim] = [*names(site.inputs[0].shape)]
    dim = site.arg("dim") % (len(inputs) + 1)
    outputs = [*inputs[:dim], (), *inputs[dim:]]
    return site.make([inputs], [outputs], linear=FIRST)


def squeeze(site: Site) -> Sharding | None:
    """Dimensions of length one disappear."""
    shape = site.inputs[0].shape
    gone = {d for d in normal(site.arg("dim"), len(shape)) if shape[d] == 1}
    inputs = [() if d in gone else f for d, f in enumerate(names(shape))]
    outputs = [f for d, f in enumerate(inputs) if d not in gone]
    return site.make([inputs], [outputs], linear=FIRST)


def permuted(order: Callable[[Site, int], list[int]]) -> Rule:
    """The dimensions of the operand in another order."""

    def rule(site: Site) -> Sharding | None:
        source = names(site.inputs[0].shape)
        target = [source[d] for d in order(site, len(source))]
        return site.make([source], [target], linear=FIRST)

    return rule


def transposed(site: Site, rank: int) -> list[int]:
    order = list(range(rank))
    first, second = site.arg("dim0") % rank, site.arg("dim1") % rank
    order[first], order[second] = order[second], order[first]
    return order


def expand(site: Site) -> Sharding | None:
    """Broadcasts to a larger shape; what is new may be split in the result."""
    (source,), (target,) = site.inputs, site.outputs
    assert target is not None
    inputs = broadcast(source.shape, target.shape)
    return site.make([inputs], [names(target.shape)], linear=FIRST, shape_argument=1)


def repeat(site: Site) -> Sharding | None:
    """Tiles: dimensions that are not repeated stay as they are."""
    (source,), (target,) = site.inputs, site.outputs
    assert target is not None
    offset = len(target.shape) - len(source.shape)
    whole = [d for d, n in enumerate(site.arg("repeats")) if n != 1]
    outputs = names(target.shape, whole, "o")
    inputs = names(target.shape, whole, "i")[offset:]
    return site.make([inputs], [outputs], linear=FIRST)


def slices(site: Site) -> Sharding | None:
    """A part of one dimension; nothing changes if it is all of it."""
    source, target = site.inputs[0], site.outputs[0]
    assert target is not None
    dim = site.arg("dim") % len(source.shape)
    cut = [dim] if source.shape != target.shape else []
    inputs, outputs = names(source.shape, cut, "i"), names(target.shape, cut, "o")
    return site.make([inputs], [outputs], linear=FIRST)


def select(site: Site) -> Sharding | None:
    """One element of a dimension."""
    dim = site.arg("dim") % len(site.inputs[0].shape)
    inputs = names(site.inputs[0].shape, [dim])
    outputs = [f for d, f in enumerate(inputs) if d != dim]
    return site.make([inputs], [outputs], linear=FIRST)


def unbind(site: Site) -> Sharding | None:
    """All elements of a dimension, each a result."""
    dim = site.arg("dim") % len(site.inputs[0].shape)
    inputs = names(site.inputs[0].shape, [dim])
    outputs = [f for d, f in enumerate(inputs) if d != dim]
    return site.make([inputs], [outputs] * len(site.outputs), linear=FIRST)


def split(site: Site) -> Sharding | None:
    """Consecutive parts of a dimension, each a result."""
    dim = site.arg("dim") % len(site.inputs[0].shape)
    inputs = names(site.inputs[0].shape, [dim])
    outputs = [m and names(m.shape, [dim], f"o{n}") for n, m in enumerate(site.outputs)]
    return site.make([inputs], outputs, linear=FIRST)


def select_backward(site: Site) -> Sharding | None:
    """Gradient of `select`: zeros but for one element of a dimension."""
    (target,) = site.outputs
    assert target is not None
    dim = site.arg("dim") % len(target.shape)
    outputs = names(target.shape, [dim])
    inputs = [f for d, f in enumerate(outputs) if d != dim]
    return site.make([inputs], [outputs], linear=FIRST, shape_argument=1)


def slice_backward(site: Site) -> Sharding | None:
    """Gradient of `slice`: zeros around a part of a dimension."""
    (source,), (target,) = site.inputs, site.outputs
    assert target is not None
    dim = site.arg("dim") % len(target.shape)
    cut = [dim] if source.shape != target.shape else []
    inputs, outputs = names(source.shape, cut, "i"), names(target.shape, cut, "o")
    return site.make([inputs], [outputs], linear=FIRST, shape_argument=1)


def slice_scatter(site: Site) -> Sharding | None:
    """A part of one dimension replaced."""
    source, part = site.inputs
    dim = site.arg("dim") % len(source.shape)
    cut = [dim] if source.shape != part.shape else []
    whole = names(source.shape, cut, "i")
    replaced = names(part.shape, cut, "p")
    return site.make([whole, replaced], [whole], linear=BOTH)


def select_scatter(site: Site) -> Sharding | None:
    """One element of a dimension replaced."""
    dim = site.arg("dim") % len(site.inputs[0].shape)
    whole = names(site.inputs[0].shape, [dim])
    replaced = [f for d, f in enumerate(whole) if d != dim]
    return site.make([whole, replaced], [whole], linear=BOTH)


def unfold(site: Site) -> Sharding | None:
    """Windows of one dimension, their elements as a new last one."""
    dim = site.arg("dimension") % max(len(site.inputs[0].shape), 1)
    inputs = names(site.inputs[0].shape, [dim], "i")
    outputs = [*names(site.inputs[0].shape, [dim], "o"), "window!"]
    return site.make([inputs], [outputs], linear=FIRST)


def diagonal(site: Site) -> Sharding | None:
    """The diagonal of two dimensions, as a new last one."""
    rank = len(site.inputs[0].shape)
    dims = [site.arg("dim1") % rank, site.arg("dim2") % rank]
    inputs = names(site.inputs[0].shape, dims)
    outputs = [f for d, f in enumerate(inputs) if d not in dims] + ["diagonal!"]
    return site.make([inputs], [outputs], linear=FIRST)


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
    inputs, outputs = (
        names(source.shape, changed, "i"),
        names(target.shape, changed, "o"),
    )
    return site.make([inputs], [outputs])
