"""Sharding rules of operators that read or write at given indices."""

from typing import Any

import torch

from ._rule_kinds import Site, broadcast, names, reducing
from ._sharding import Dim, Sharding


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
    return reducing(found, "sum")


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


def bucketize(site: Site) -> Sharding | None:
    """The place of every element among boundaries."""
    values = names(site.inputs[0].shape)
    return site.make([values, ["boundary!"]], [values])


def index_select(site: Site) -> Sharding | None:
    """Slices of a dimension at the given indices."""
    dim = site.arg("dim") % len(site.inputs[0].shape)
    source = names(site.inputs[0].shape, [dim])
    place = ["i"] if site.inputs[1].shape else []  # a 0-dim index splits nothing
    target = [f if d != dim else (place or ["i!"])[0] for d, f in enumerate(source)]
    return site.make([source, place], [target])


def index_add(site: Site) -> Sharding | None:
    """Adds slices to a dimension at the given indices."""
    dim = site.arg("dim") % len(site.inputs[0].shape)
    source = names(site.inputs[0].shape, [dim])
    part = [f if d != dim else "i" for d, f in enumerate(source)]
    found = site.make([source, ["i"], part], [source], addend=frozenset({0}))
    return reducing(found, "sum")


def _index_layout(site: Site) -> tuple[list[str], list[list[Any]], list[Any]] | None:
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
        return reducing(found, "sum")
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
