"""Sharding rules of fused layers and optimisers, and of products with a bias."""

from collections.abc import Sequence
from typing import Any

from ._layout import Meta
from ._rule_kinds import Site, broadcast, names, reducing
from ._sharding import Sharding
from ._torch import schema


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
    shape = site.arg(
        "input_shape" if has_argument(site, "input_shape") else "normalized_shape"
    )
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
    return reducing(site.make(inputs, outputs), "sum") if lead else None


def has_argument(site: Site, name: str) -> bool:
    return any(argument.name == name for argument in schema(site.node.op).arguments)


def _is_statistic(shape: Sequence[int], lead: int, trailing: int) -> bool:
    return len(shape) == lead + trailing and all(n == 1 for n in shape[lead:])


def attention(site: Site) -> Sharding | None:
    """Fused attention: batch and heads may be split, positions not."""
    spelled = [_attention_dims(site, m, n) for n, m in enumerate(site.inputs)]
    outputs = [
        m and _attention_dims(site, m, -n - 1) for n, m in enumerate(site.outputs)
    ]
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
    return reducing(site.make(inputs, outputs), "sum")


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


def added_product(site: Site, bias: str, product: str) -> Sharding | None:
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
    return reducing(found, "sum")
