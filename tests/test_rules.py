"""Every rule of the table against its operator: all that it admits, on all ranks.

A sample is one call of an operator. For every way in which its rule lets operands and
results lie on a mesh, each rank computes on its parts what `lower` tells it to, and
what the ranks made, put together, must be the result of the plain call. Ways are found
from the placements that operands or results may have: every dimension split, also into
empty parts, and pending sums where the rule says that the operator is linear.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import assert_same
from torch import Tensor

from yafsdp_fn import _rules
from yafsdp_fn._bind import compute
from yafsdp_fn._choose import choose, linear_choices, needs_of_result
from yafsdp_fn._graph import Node, Ref, map_leaves, results
from yafsdp_fn._layout import (
    SUM,
    WHOLE,
    Meta,
    Pending,
    Placement,
    Placements,
    Split,
    covers,
    even_chunk,
    interval,
    local_shape,
)
from yafsdp_fn._lower import lower
from yafsdp_fn._placed import Placed, Step, Value
from yafsdp_fn._program import Compute
from yafsdp_fn._rule_kinds import FIRST, Site, pattern, reduction
from yafsdp_fn._sharding import Sharding
from yafsdp_fn._torch import TorchDispatchMode, get_decompositions

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
MESHES = ((2,), (3,), (4,), (2, 2))

# --- samples --------------------------------------------------------------------------

GENERATOR = torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


def x(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers between 0.1 and 0.9, where most functions are defined."""
    return torch.rand(shape, generator=GENERATOR, dtype=dtype) * 0.8 + 0.1


def z(*shape: int) -> Tensor:
    return torch.complex(x(*shape), x(*shape))


def whole(*shape: int, below: int = 5) -> Tensor:
    return torch.randint(below, shape, generator=GENERATOR)


def mask(*shape: int) -> Tensor:
    return whole(*shape, below=2).bool()


def named(*names: str) -> list[Any]:
    """Operators by `name` or `name.overload`."""
    pairs = (f"{name}.default".split(".")[:2] for name in " ".join(names).split())
    return [getattr(getattr(aten, name), overload) for name, overload in pairs]


Samples = dict[Any, list[Call]]


def alike(names: str, *calls: Call) -> Samples:
    """The same calls of several operators."""
    return {op: [*calls] for op in named(names)}


# --- elementwise ----------------------------------------------------------------------

FLOAT = named(
    "abs acos acosh angle asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc",
    "erfinv exp exp2 expm1 floor frac gelu hardsigmoid hardswish i0 isfinite isinf",
    "isnan lgamma log log10 log1p log2 log_sigmoid_forward logit mish nan_to_num neg",
    "positive rad2deg reciprocal relu round rsqrt sgn sigmoid sign signbit silu sin",
    "sinc sinh softplus softshrink special_entr special_erfcx special_i0e special_i1",
    "special_log_ndtr special_ndtri sqrt square tan tanh trunc elu leaky_relu celu",
    "hardshrink hardtanh selu relu6 clone logical_not frexp.Tensor",
)
INTEGER = named("bitwise_not logical_not abs neg sign square relu clone")
WITH_NUMBER = named(
    "add.Scalar sub.Scalar mul.Scalar div.Scalar rsub.Scalar pow.Tensor_Scalar",
    "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar fmod.Scalar",
    "remainder.Scalar clamp clamp_min clamp_max copysign.Scalar xlogy.Scalar_Other",
    "hardshrink leaky_relu",
)
PAIRS = named(
    "add.Tensor sub.Tensor mul.Tensor div.Tensor rsub.Tensor pow.Tensor_Tensor",
    "atan2 maximum minimum fmax fmin fmod.Tensor remainder.Tensor hypot heaviside",
    "copysign.Tensor logaddexp logaddexp2 nextafter xlogy.Tensor igamma igammac",
    "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and",
    "logical_or logical_xor clamp_min.Tensor clamp_max.Tensor special_zeta",
    "special_xlog1py ldexp.Tensor",
)
INTEGER_PAIRS = named(
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor gcd lcm",
    "bitwise_left_shift.Tensor bitwise_right_shift.Tensor maximum mul.Tensor",
)
GRADIENTS = named(  # of an elementwise operator, from its result or its operand
    "sigmoid_backward tanh_backward silu_backward mish_backward hardswish_backward",
    "hardsigmoid_backward gelu_backward logit_backward",
)
TRIPLES = named("addcmul addcdiv lerp.Tensor clamp.Tensor where.self")


def broadcast(make: Callable[..., Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Operands that are as long, longer, shorter, and of other ranks."""
    shapes = [
        ((5, 3), (5, 3)),
        ((5, 1), (1, 3)),
        ((2, 5, 3), (3,)),
        ((7,), (1, 7)),
        ((), (5,)),
        ((0, 3), (3,)),
        ((1, 1, 6), (6, 1, 1)),
    ]
    return [(make(*left), make(*right)) for left, right in shapes]


ELEMENTWISE: Samples = {op: [call(x(5, 3)), call(x(1, 0, 3))] for op in FLOAT}
for _op in INTEGER:
    ELEMENTWISE.setdefault(_op, []).append(call(whole(5, 3) - 2))
for _op in WITH_NUMBER:
    ELEMENTWISE.setdefault(_op, []).append(call(x(5, 1, 3), 0.5))
for _op in PAIRS:
    ELEMENTWISE[_op] = [call(*pair) for pair in broadcast(x)]
for _op in INTEGER_PAIRS:
    ELEMENTWISE.setdefault(_op, []).extend(call(*pair) for pair in broadcast(whole))
for _op in GRADIENTS:
    ELEMENTWISE[_op] = [call(x(5, 3), x(5, 3))]
for _op in TRIPLES:
    first = mask if _op is aten.where.self else x
    ELEMENTWISE[_op] = [
        call(first(5, 3), x(5, 3), x(5, 3)),
        call(first(5, 1), x(2, 1, 3), x(3)),
    ]
ELEMENTWISE |= {
    aten.pow.Scalar: [call(2.0, x(5, 3))],
    aten.add.Tensor: [
        *ELEMENTWISE[aten.add.Tensor],
        call(x(5, 3), x(3), alpha=-2),
        call(x(5, 3), 2.0),
        call(whole(5, 3), x(5, 3)),
        call(x(5, 3), x(5, 3, dtype=torch.float32)),
    ],
    aten.div.Tensor_mode: [call(x(5, 3), x(3), rounding_mode="floor")],
    aten.lerp.Scalar: [call(x(5, 3), x(3), 0.3)],
    aten.threshold.default: [call(x(5, 3), 0.4, 7.0)],
    aten.threshold_backward.default: [call(x(5, 3), x(5, 3), 0.4)],
    aten.leaky_relu_backward.default: [call(x(5, 3), x(5, 3) - 0.5, 0.1, False)],
    aten.elu_backward.default: [call(x(5, 3), 1.0, 2.0, 1.0, False, x(5, 3) - 0.5)],
    aten.hardtanh_backward.default: [call(x(5, 3), x(5, 3), 0.3, 0.6)],
    aten.softplus_backward.default: [call(x(5, 3), x(5, 3), 1.0, 20.0)],
    aten.softshrink_backward.default: [call(x(5, 3), x(5, 3), 0.5)],
    aten.log_sigmoid_backward.default: [call(x(5, 3), x(5, 3), x(5, 3))],
    aten.native_dropout_backward.default: [call(x(5, 3), mask(5, 3), 2.0)],
    aten.masked_fill.Scalar: [
        call(x(5, 3), mask(5, 3), 2.0),
        call(x(5, 3), mask(3), 2.0),
        call(x(5, 1), mask(5, 3), -math.inf),
    ],
    aten.masked_fill.Tensor: [call(x(5, 3), mask(5, 1), x())],
    aten._prelu_kernel.default: [call(x(5, 3) - 0.5, x(1, 3))],
    aten._prelu_kernel_backward.default: [call(x(5, 3), x(5, 3) - 0.5, x(1, 3))],
    aten.complex.default: [call(x(5, 3), x(5, 3)), call(x(5, 1), x(3))],
    aten.polar.default: [call(x(5, 3), x(5, 3))],
    aten.copy.default: [call(x(5, 3), x(3)), call(whole(5, 3), x(5, 1))],
    aten.mul.Tensor: [*ELEMENTWISE[aten.mul.Tensor], call(z(5, 3), x(3))],
    aten.conj_physical.default: [call(z(5, 3))],
    aten._to_copy.default: [
        call(x(5, 3), dtype=torch.float32),
        call(x(5, 3, dtype=torch.float32), dtype=torch.float64),
        call(whole(5, 3), dtype=torch.float64),
        call(mask(5, 3), dtype=torch.int64),
    ],
    aten.clone.default: [
        *ELEMENTWISE[aten.clone.default],
        call(x(5, 3).T, memory_format=torch.contiguous_format),
    ],
}

# --- products -------------------------------------------------------------------------

PRODUCTS: Samples = {
    aten.mm.default: [
        call(x(5, 7), x(7, 3)),
        call(x(1, 5), x(5, 1)),
        call(x(5, 0), x(0, 3)),
        call(x(7, 5).T, x(3, 7).T),
        call(z(5, 7), z(7, 3)),
        call(x(9, 10), x(10, 2)),  # thin enough that a pending factor stays pending
    ],
    aten.bmm.default: [
        call(x(3, 5, 7), x(3, 7, 2)),
        call(x(1, 5, 6), x(1, 6, 5)),
        call(x(3, 9, 10), x(3, 10, 2)),
    ],
    aten.mv.default: [call(x(5, 7), x(7))],
    aten.dot.default: [call(x(7), x(7)), call(z(7), z(7))],
    aten.vdot.default: [call(z(7), z(7))],
    aten.addmm.default: [
        call(bias, x(5, 7), x(7, 3), beta=2, alpha=0.5)
        for bias in (x(3), x(5, 3), x(5, 1), x(1, 3), x())
    ],
    aten.baddbmm.default: [
        call(bias, x(3, 5, 7), x(3, 7, 2), beta=2, alpha=0.5)
        for bias in (x(3, 5, 2), x(3, 1, 2), x(1, 5, 2), x(2), x())
    ],
}

# --- views, slices, joins -------------------------------------------------------------

RESHAPED = [
    ((5, 6), (30,)),
    ((30,), (5, 6)),
    ((6, 4), (3, 8)),
    ((12, 5), (3, 2, 2, 5)),
    ((5, 1, 3), (5, 3)),
    ((5, 3), (1, 5, 1, 3, 1)),
    ((3, 1, 1), (1, 3)),
    ((6, 5), (5, 6)),
    ((9, 4, 3), (9, 12)),
    ((10, 6), (4, 15)),
    ((0, 3), (3, 0)),
    ((1,), ()),
    ((), (1, 1)),
    ((2, 5, 6, 2), (2, 30, 2)),
]
SPLITS: list[Call] = [call(x(5, 6), 4), call(x(5, 6), 2, 1), call(x(5, 6), 9, -1)]
SIZES: list[Call] = [call(x(5, 6), [4, 1]), call(x(5, 6), [0, 1, 5], -1)]

VIEWS: Samples = {
    **{
        op: [call(x(*before), list(after)) for before, after in RESHAPED]
        for op in named("view _unsafe_view reshape _reshape_copy")
    },
    aten.unsqueeze.default: [
        call(x(5, 3), 0),
        call(x(5, 3), 1),
        call(x(1, 5), -1),
        call(x(), 0),
    ],
    aten.squeeze.dims: [
        call(x(5, 1, 3), [1]),
        call(x(1, 5, 1), [0, -1]),
    ],
    aten.permute.default: [call(x(5, 3, 2), [2, 0, 1]), call(x(5, 3, 1), [-1, 1, 0])],
    aten.transpose.int: [call(x(5, 3, 2), 0, -1), call(x(1, 5), 0, 1)],
    aten.t.default: [call(x(5, 3)), call(x(5)), call(x())],
    aten.expand.default: [
        call(x(1, 3), [5, 3]),
        call(x(3), [5, 3]),
        call(x(5, 1), [-1, 7]),
        call(x(), [6]),
        call(x(1), [0]),
    ],
    aten.repeat.default: [
        call(x(5, 3), [1, 2]),
        call(x(5, 3), [2, 1]),
        call(x(5), [2, 1]),
        call(x(5, 3), [0, 1]),
    ],
    aten.slice.Tensor: [
        call(x(5, 6), 0, 1, 4),
        call(x(5, 6), 1, 0, 9),
        call(x(5, 6), -1, 0, 6, 2),
        call(x(5, 6), 0, 3, 3),
    ],
    aten.select.int: [call(x(5, 3, 2), 0, 2), call(x(5, 3, 2), -2, -1)],
    aten.unbind.int: [call(x(5, 3)), call(x(5, 3), -1)],
    aten.split.Tensor: SPLITS,
    aten.unsafe_split.Tensor: SPLITS,
    aten.split_with_sizes.default: SIZES,
    aten.unsafe_split_with_sizes.default: SIZES,
    aten.unfold.default: [
        call(x(7, 5), 0, 3, 2),
        call(x(7, 5), -1, 2, 1),
        call(x(7, 5), 0, 2, 3),
    ],
    aten.diagonal.default: [
        call(x(5, 3, 5), 1, 0, 2),
        call(x(6, 5, 3), 0, 1, -1),
        call(x(5, 3)),
    ],
    aten.select_backward.default: [
        call(x(5, 3), [5, 4, 3], 1, 2),
        call(x(3), [5, 3], 0, -1),
        call(x(5, 3), [5, 1, 3], 1, 0),
    ],
    aten.slice_backward.default: [
        call(x(5, 3), [5, 7], 1, 1, 6, 2),
        call(x(3, 6), [5, 6], 0, 1, 4, 1),
        call(x(5, 6), [5, 6], 0, 0, 5, 1),
    ],
    aten.slice_scatter.default: [
        call(x(5, 6), x(5, 2), 1, 1, 3),
        call(x(5, 6), x(3, 6), 0, 2),
        call(x(5, 6), x(5, 6), 0),
    ],
    aten.select_scatter.default: [
        call(x(5, 6), x(5), 1, 2),
        call(x(5, 6, 3), x(6, 3), 0, -1),
    ],
    aten.cat.default: [
        call([x(5, 3), x(5, 2)], 1),
        call([x(5, 3), x(5, 3)], 0),
        call([x(5, 3), x(5, 0), x(5, 1)], -1),
        call([x(1, 6)] * 3),
        call([x(5, 3), x(0)]),
    ],
    aten.stack.default: [call([x(5, 3), x(5, 3)], 1), call([x(5), x(5), x(5)], -1)],
    aten.constant_pad_nd.default: [
        call(x(5, 6), [1, 2]),
        call(x(5, 6), [0, 0, 1, -1], 3.0),
        call(x(5, 6), [1, -1]),
    ],
    aten.view_as_real.default: [call(z(5, 3))],
    aten.view_as_complex.default: [call(x(5, 3, 2)), call(x(5, 2))],
}

# --- reductions -----------------------------------------------------------------------

ALL_OF_IT = [call(x(5, 3)), call(x(1, 6)), call(x()), call(whole(5, 3) - 2)]
ONE_DIM = [call(x(5, 3, 2), 0), call(x(5, 3, 2), -1, True), call(x(1, 5), 0)]
SOME_DIMS = [
    call(x(5, 3, 2), [0, 2]),
    call(x(5, 3, 2), [1], True),
    call(x(5, 3), []),
    call(x(1, 5), [0], True),
    call(whole(5, 3) - 2, [0]),
    call(mask(5, 3), [-1]),
]
TRUTH = [call(mask(5, 3)), call(whole(5, 3)), call(torch.zeros(5, 3).bool())]
TRUTHS = [call(mask(5, 3, 2), 1), call(mask(5, 3), 0, True), call(whole(5, 3), -1)]

REDUCTIONS: Samples = {
    aten.sum.default: [
        *ALL_OF_IT,
        call(mask(5, 3)),
        call(x(0, 3)),
        call(x(5, 3, dtype=torch.float32), dtype=torch.float64),
    ],
    aten.sum.dim_IntList: [
        *SOME_DIMS,
        call(x(5, 3), None),
        call(x(0, 3), [0]),
        call(whole(5, 3), [0], dtype=torch.float64),
    ],
    aten.amax.default: SOME_DIMS,
    aten.amin.default: SOME_DIMS,
    aten.any.default: TRUTH,
    aten.all.default: TRUTH,
    aten.any.dim: TRUTHS,
    aten.all.dim: TRUTHS,
    aten.any.dims: [call(mask(5, 3, 2), [0, 2]), call(mask(5, 3), None, True)],
    aten.all.dims: [call(mask(5, 3, 2), [0, 2]), call(mask(5, 3), None, True)],
    aten.logsumexp.default: [call(x(5, 3, 2), [0, 2]), call(x(5, 3), [1], True)],
    aten.linalg_vector_norm.default: [
        call(x(5, 3, 2), 2, [0, 2]),
        call(x(5, 3), 3, [1], True),
        call(x(5, 3)),
    ],
    **alike("prod.dim_int max.dim min.dim median.dim mode", *ONE_DIM),
    aten.kthvalue.default: [call(x(5, 3, 2), 2, 0), call(x(5, 3), 3, -1, True)],
    **alike("argmax argmin", *ONE_DIM, call(x(5, 3))),
}

# --- along some dimensions ------------------------------------------------------------

CUMULATIVE = [call(x(5, 3), 0), call(x(5, 3, 2), -2), call(x(1, 6), 1), call(x(), 0)]
BACK = [call(x(5, 3), x(5, 3), dim, torch.float64) for dim in (0, -1)]
ALONG: Samples = {
    **alike(
        "_softmax _log_softmax",
        call(x(5, 3), 0, False),
        call(x(5, 3, 2), -1, False),
    ),
    **alike("_softmax_backward_data _log_softmax_backward_data", *BACK),
    **alike("cumsum cumprod logcumsumexp", *CUMULATIVE),
    aten.sort.default: [*CUMULATIVE, call(x(5, 3), 1, True)],
    aten.sort.stable: [call(whole(5, 6), stable=True, dim=d) for d in (0, 1)],
    aten.topk.default: [call(x(5, 6), 3, 0), call(x(5, 6), 2, -1, False)],
    aten.flip.default: [call(x(5, 3), [0]), call(x(5, 3, 2), [-1, 1])],
    aten.roll.default: [call(x(5, 3), [1], [0]), call(x(5, 3), [2])],
    aten._fft_r2c.default: [call(x(5, 6), [1], 0, True), call(x(5, 6, 3), [1], 1, 0)],
    aten._fft_c2c.default: [call(z(5, 6), [0], 0, True), call(z(5, 6), [1], 1, False)],
    aten._fft_c2r.default: [call(z(5, 4), [1], 2, 7), call(z(5, 4), [0, 1], 0, 6)],
    **alike(
        "tril triu", call(x(5, 3), 0), call(x(3, 5, 5), 1), call(x(2, 1, 5, 2), -1)
    ),
}

# --- planes and volumes ---------------------------------------------------------------


def with_gradient(name: str, shape: Sequence[int], *options: Any) -> Samples:
    """A pooling or padding operator and its gradient, with and without a batch."""
    (forward,), (backward,) = named(name), named(f"{name}_backward")
    sources = [x(5, *shape), x(*shape)]
    made = [results(forward(source, *options)) for source in sources]
    return {
        forward: [call(source, *options) for source in sources],
        backward: [
            call(torch.rand_like(out), source, *options, *indices)
            for source, (out, *indices) in zip(sources, made, strict=True)
        ],
    }


def resized(name: str, before: Sequence[int], after: Sequence[int]) -> Samples:
    """An interpolation and its gradient."""
    (forward,), (backward,) = named(name), named(f"{name}_backward")
    corners = [] if "nearest" in name else [False]
    shape = [5, 2, *before]
    return {
        forward: [call(x(*shape), after, *corners)],
        backward: [call(x(5, 2, *after), after, shape, *corners)],
    }


POOLING = ([2, 2], [2, 2], [1, 1])
PLANES: Samples = {
    **with_gradient("avg_pool2d", (2, 4, 6), *POOLING, False, True, None),
    **with_gradient(
        "avg_pool3d", (2, 4, 6, 4), *[[2] * 3, [2] * 3], [1] * 3, *(0, 1, None)
    ),
    **with_gradient("max_pool2d_with_indices", (2, 4, 6), *POOLING, [1, 1], False),
    **with_gradient(
        "max_pool3d_with_indices", (2, 4, 6, 4), *[[2] * 3] * 2, [1] * 3, [1] * 3, False
    ),
    aten._adaptive_avg_pool2d.default: [call(x(5, 2, 4, 6), [3, 2])],
    aten._adaptive_avg_pool2d_backward.default: [call(x(5, 2, 3, 2), x(5, 2, 4, 6))],
    **with_gradient("reflection_pad1d", (2, 6), [2, 1]),
    **with_gradient("replication_pad1d", (2, 6), [2, 1]),
    **with_gradient("reflection_pad2d", (2, 4, 6), [2, 1, 1, 0]),
    **with_gradient("replication_pad2d", (2, 4, 6), [2, 1, 1, 0]),
    **resized("upsample_nearest1d", [4], [7]),
    **resized("upsample_linear1d", [4], [7]),
    **resized("upsample_nearest2d", [4, 3], [7, 5]),
    **resized("upsample_bilinear2d", [4, 3], [7, 5]),
    **resized("upsample_bicubic2d", [4, 3], [7, 5]),
}

# --- lookups --------------------------------------------------------------------------

WRITES = [
    call(x(5, 6), 0, whole(5, 6), x(5, 6)),
    call(x(5, 6), 1, whole(5, 6), x(5, 6)),
    call(x(5, 6), -1, whole(3, 6), x(5, 6)),
    call(x(7, 6), 0, whole(3, 6), x(3, 6)),
]
PLACES = [  # the shape of a source, and the indices of some of its dimensions
    ((5, 6), [whole(7)]),
    ((5, 6), [None, whole(7)]),
    ((5, 6), [whole(7), whole(7)]),
    ((5, 6, 3), [whole(7, 1), None, whole(3, below=3)]),
    ((5, 6, 3), [None, whole(2, 5), whole(5, below=3)]),
    ((6, 5), [whole(0)]),
    ((5, 6), [whole()]),
]


def put(shape: Sequence[int], indices: Sequence[Any], accumulate: bool) -> list[Call]:
    """Assignments of as many values as there are places, and of one value."""
    source = x(*shape)
    values = x(*aten.index.Tensor(source, indices).shape)
    if not accumulate:  # two writes to one place come in any order
        values = torch.full_like(values, 2.0)
    return [call(source, indices, v, accumulate) for v in (values, x())]


LOOKUPS: Samples = {
    aten.embedding.default: [
        call(x(7, 4), whole(5, 3)),
        call(x(7, 4), whole(5), 2),
        call(x(5, 1), whole()),
    ],
    aten.embedding_dense_backward.default: [
        call(x(5, 3, 4), whole(5, 3), 7, -1, False),
        call(x(6, 4), whole(6), 7, 2, False),
        call(x(6, 4), whole(6), 7, -1, True),
    ],
    aten.gather.default: [
        call(x(5, 6), 0, whole(3, 6)),
        call(x(5, 6), -1, whole(5, 3)),
        call(x(5, 6), 1, whole(3, 2)),
    ],
    aten.scatter.src: [call(*c.args[:3], torch.ones(5, 6).double()) for c in WRITES],
    aten.scatter.value: [call(*c.args[:3], 2.0) for c in WRITES],
    aten.scatter_add.default: WRITES,
    aten.scatter_reduce.two: [
        call(*c.args, kind, include_self=own)
        for c in WRITES
        for kind, own in (("sum", True), ("mean", False), ("amax", True))
    ],
    aten.bucketize.Tensor: [call(x(5, 3), x(6).sort()[0], right=True)],
    aten.index_select.default: [
        call(x(5, 6), 0, whole(7)),
        call(x(5, 6, 2), -2, whole(3)),
        call(x(5, 6), 0, whole()),
    ],
    aten.index_add.default: [
        call(x(5, 6), 0, whole(7), x(7, 6)),
        call(x(6, 5), -1, whole(3), x(6, 3), alpha=2),
    ],
    **alike(
        "index.Tensor _unsafe_index.Tensor",
        *(call(x(*shape), indices) for shape, indices in PLACES),
    ),
    **alike(
        "index_put _unsafe_index_put",
        *(
            sample
            for shape, indices in PLACES
            for accumulate in (True, False)
            for sample in put(shape, indices, accumulate)
        ),
    ),
}

# --- layers ---------------------------------------------------------------------------


def normalised(shape: Sequence[int], trailing: int) -> Samples:
    """Both normalisations and their gradients."""
    last, source = list(shape[-trailing:]), x(*shape)
    weight, bias = x(*last), x(*last)
    _, mean, deviation = aten.native_layer_norm(source, last, weight, bias, 1e-5)
    _, scale = aten._fused_rms_norm(source, last, weight, 1e-5)
    statistics = (mean, deviation)
    every = [True, True, True]
    return {
        aten.native_layer_norm.default: [
            call(source, last, weight, bias, 1e-5),
            call(source, last, None, None, 1e-5),
        ],
        aten.native_layer_norm_backward.default: [
            call(x(*shape), source, last, *statistics, weight, bias, every),
            call(
                x(*shape), source, last, *statistics, None, None, [True, False, False]
            ),
            call(
                x(*shape), source, last, *statistics, weight, bias, [False, True, True]
            ),
        ],
        aten._fused_rms_norm.default: [call(source, last, weight, 1e-5)],
        aten._fused_rms_norm_backward.default: [
            call(x(*shape), source, last, scale, weight, [True, True]),
        ],
    }


def attended(batch: int, heads: int, *masked: int, causal: bool = False) -> Samples:
    """Fused attention and its gradient."""
    forward, backward = named(
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
    q, k, v = (x(batch, heads, length, 4) for length in (5, 6, 6))
    options = {"attn_mask": x(*masked) if masked else None}
    out, lengths = forward(q, k, v, 0.0, causal, **options)
    grad = torch.rand_like(out)
    return {
        forward: [call(q, k, v, 0.0, causal, **options)],
        backward: [call(grad, q, k, v, out, lengths, 0.0, causal, **options)],
    }


def convolved(
    source: Sequence[int], weight: Sequence[int], *options: Any, **flags: bool
) -> Samples:
    """A convolution and its gradients."""
    image, kernel = x(*source), x(*weight)
    groups = options[-1]
    channels = weight[1] * groups if options[3] else weight[0]
    out = aten.convolution(image, kernel, x(channels), *options)
    masks = ([True, True, True], [False, True, False], [True, False, False])
    return {
        aten.convolution.default: [
            call(image, kernel, x(channels), *options),
            call(image, kernel, None, *options),
        ],
        aten.convolution_backward.default: [
            call(torch.rand_like(out), image, kernel, [channels], *options, wanted)
            for wanted in masks
        ],
    }


def updated(amsgrad: bool, rate: Any) -> Call:
    """One step of a fused optimiser on three leaves."""
    shapes = ((5, 3), (1,), (7,))
    rows = [[x(*shape) for shape in shapes] for _ in range(5)]
    steps = [torch.tensor(float(n)) for n in range(1, 4)]
    return call(
        *rows[: 5 if amsgrad else 4],
        *([] if amsgrad else [[]]),
        steps,
        lr=rate,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=amsgrad,
        maximize=False,
    )


def joined(*tables: Samples) -> Samples:
    return {
        op: [sample for table in tables for sample in table.get(op, [])]
        for op in dict.fromkeys(op for table in tables for op in table)
    }


PLAIN = ([1], [0], [1], False, [0], 1)
LAYERS: Samples = {
    **joined(
        normalised((5, 3, 6), 1),
        normalised((5, 6), 1),
        normalised((5, 2, 3), 2),
        normalised((5, 1), 1),
        normalised((5, 3), 2),
    ),
    **joined(
        attended(5, 3),
        attended(5, 3, causal=True),
        attended(1, 2, 5, 6),
        attended(5, 3, 5, 3, 5, 6),
        attended(5, 3, 1, 1, 5, 6),
        attended(3, 3, 3, 1, 5, 6),
    ),
    **joined(
        convolved((5, 2, 6), (3, 2, 3), *PLAIN),
        convolved((5, 4, 6, 5), (2, 2, 3, 3), [2, 1], [1, 1], [1, 1], False, [0, 0], 2),
        convolved((5, 2, 4, 4), (2, 3, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    ),
    **alike("_fused_adamw _fused_adam", updated(False, 0.1), updated(True, 0.1)),
    **alike(
        "_fused_adamw.tensor_lr _fused_adam.tensor_lr",
        updated(False, torch.tensor(0.1)),
    ),
}

# --- constants ------------------------------------------------------------------------

CONSTANTS: Samples = {
    aten.full.default: [call([5, 3], 2.0), call([], 1), call([0, 3], 1)],
    aten.zeros.default: [call([5, 3]), call([7], dtype=torch.int64)],
    aten.ones.default: [call([5, 3])],
    aten.empty.memory_format: [call([5, 0])],
}

SAMPLES: Samples = {
    **ELEMENTWISE,
    **PRODUCTS,
    **VIEWS,
    **REDUCTIONS,
    **ALONG,
    **PLANES,
    **LOOKUPS,
    **LAYERS,
    **CONSTANTS,
}

# --- calls as nodes -------------------------------------------------------------------


class Kernels(TorchDispatchMode):
    """Computes what has no kernel here by the operators that it is made of."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return WITHOUT_KERNEL.get(func, func)(*args, **(kwargs or {}))


WITHOUT_KERNEL = get_decompositions([aten._fused_rms_norm_backward])


@dataclass(frozen=True)
class Sample:
    """A call as a node of a graph, with its operands and what it makes of them."""

    site: Site
    operands: tuple[Tensor, ...]
    results: tuple[Tensor | None, ...]


def sample_of(op: Any, made: Call) -> Sample:
    operands: list[Tensor] = []

    def number(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        operands.append(leaf)
        return Ref(len(operands) - 1)

    args, kwargs = map_leaves(number, (made.args, made.kwargs))
    with Kernels():
        found = tuple(results(op(*made.args, **made.kwargs)))
    outputs = tuple(
        None if r is None else Ref(len(operands) + n) for n, r in enumerate(found)
    )
    node = Node(op, args, kwargs, outputs, "")
    inputs = tuple(map(Meta.of, operands))
    metas = tuple(None if r is None else Meta.of(r) for r in found)
    return Sample(Site(node, inputs, metas), tuple(operands), found)


# --- the ways that a rule admits ------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """Where operands and results lie."""

    needs: tuple[Placements, ...]
    results: tuple[Placements, ...]


Question = tuple[frozenset[int], int | None]  # operands, and a dim to split; None: sums


def ways(site: Site, rule: Sharding, sizes: Sequence[int]) -> set[Way]:
    """Everything that a rule admits on a mesh, but for computing whole."""
    found = {*ways_of_operands(site, rule, sizes), *ways_of_results(site, rule, sizes)}
    whole = (WHOLE,) * len(sizes)
    return {
        way
        for way in found
        if {*way.needs, *way.results} != {whole} and way_covers(site, way, sizes)
    }


def ways_of_operands(site: Site, rule: Sharding, sizes: Sequence[int]) -> Iterator[Way]:
    """Each axis asks one operand to be split or pending, or none."""
    for asked in itertools.product(*(questions(site, rule, n) for n in sizes)):
        yield from way_of(site, rule, asked, sizes)


def questions(site: Site, rule: Sharding, ranks: int) -> list[Question | None]:
    """What may be asked of the operands on one axis, each with another answer."""
    sums = {frozenset({n}) for group in rule.linear for n in group} | {*rule.linear}
    asked: list[Question | None] = [(group, None) for group in sorted(sums, key=sorted)]
    operands = enumerate(site.inputs)
    asked += [(frozenset({n}), d) for n, m in operands for d in range(len(m.shape))]
    answers = {w: q for q in (*asked, None) for w in way_of(site, rule, [q], [ranks])}
    return list(answers.values())


def way_of(
    site: Site, rule: Sharding, asked: Sequence[Question | None], sizes: Sequence[int]
) -> Iterator[Way]:
    """What `place` chooses for operands that lie as they are asked to."""
    operands = [value(n, m, asked, sizes) for n, m in enumerate(site.inputs)]
    choices = [
        next(linear_choices(rule, operands, axis), None)
        if any(v.placements[axis] == SUM for v in operands)
        else choose(rule, operands, len(site.outputs), axis)
        for axis in range(len(sizes))
    ]
    kept = [c for c in choices if c is not None]
    if len(kept) == len(sizes):
        needs = tuple(zip(*(c.needs for c in kept), strict=True))
        yield Way(needs, tuple(zip(*(c.results for c in kept), strict=True)))


def value(
    number: int, meta: Meta, asked: Sequence[Question | None], sizes: Sequence[int]
) -> Value:
    """An operand that lies as it is asked to; an inner axis cuts what is left."""
    shape = list(meta.shape)
    placements: list[Placement] = []
    for question, ranks in zip(asked, sizes, strict=True):
        placement: Placement = WHOLE
        if question is not None and number in question[0]:
            placement = even_split(shape, question[1], ranks)
        placements.append(placement)
    return Value(Ref(number), meta, tuple(placements), number)


def even_split(shape: list[int], dim: int | None, ranks: int) -> Placement:
    """A dimension in even parts, which `shape` becomes; without one, a sum."""
    if dim is None:
        return SUM
    shape[dim] = even_chunk(shape[dim], ranks)
    return Split(dim, shape[dim])


def ways_of_results(site: Site, rule: Sharding, sizes: Sequence[int]) -> Iterator[Way]:
    """A result is wanted in parts, as that of a constant or of what is replayed."""
    target = site.outputs[0]
    if target is None or len({*rule.outputs}) > 1:
        return
    for dim in range(len(target.shape)):
        shape = list(target.shape)
        wanted = tuple(even_split(shape, dim, ranks) for ranks in sizes)
        needs = needs_of_result(rule, wanted)
        if needs is not None:
            yield Way(tuple(needs), (wanted,) * len(site.outputs))


def way_covers(site: Site, way: Way, sizes: Sequence[int]) -> bool:
    """Whether parts make up the whole; `place` takes no way in which they do not."""
    pairs = [
        *zip(site.inputs, way.needs, strict=True),
        *zip(site.outputs, way.results, strict=True),
    ]
    return all(m is None or covers(m.shape, p, sizes) for m, p in pairs)


# --- computing in one of these ways ---------------------------------------------------

Parts = dict[tuple[int, ...], Tensor]  # what the rank at a coordinate holds


def parts_of(value: Tensor, placements: Placements, sizes: Sequence[int]) -> Parts:
    """A value as the ranks hold it; the parts of a pending sum mean nothing alone."""
    parts: Parts = {(): value}
    for placement, ranks in zip(placements, sizes, strict=True):
        held = {at: shares(part, placement, ranks) for at, part in parts.items()}
        parts = {
            (*at, rank): share
            for at, row in held.items()
            for rank, share in enumerate(row)
        }
    return {at: cut(part, placements, at) for at, part in parts.items()}


def shares(value: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    """Tensors that add up to a pending sum; else the value on every rank."""
    if not isinstance(placement, Pending):
        return [value] * ranks
    rest = [torch.ones_like(value) * (rank + 2) for rank in range(ranks - 1)]
    return [value - sum(rest), *rest]


def cut(value: Tensor, placements: Placements, coordinate: Sequence[int]) -> Tensor:
    for dim, length in enumerate(value.shape):
        start, stop = interval(length, dim, placements, coordinate)
        value = value.narrow(dim, start, stop - start)
    return value


def together(parts: Parts, placements: Placements) -> Tensor:
    """The value that the ranks hold; what the last axis cut is joined first."""
    for placement in reversed(placements):
        rows: dict[tuple[int, ...], list[Tensor]] = {}
        for at, part in sorted(parts.items(), key=lambda item: item[0]):
            rows.setdefault(at[:-1], []).append(part)
        parts = {at: joined_row(row, placement) for at, row in rows.items()}
    return parts[()]


def joined_row(row: list[Tensor], placement: Placement) -> Tensor:
    if isinstance(placement, Split):
        return torch.cat(row, placement.dim)
    if isinstance(placement, Pending):
        stacked = torch.stack(row)
        reduce = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[placement.op]
        return reduce(stacked, 0).to(stacked.dtype)
    for part in row[1:]:
        assert_same(part, row[0])
    return row[0]


def compute_in_parts(
    sample: Sample, rule: Sharding, way: Way, sizes: Sequence[int], packed: bool
) -> list[Parts | None]:
    """What every rank makes of its parts if it computes as `lower` says.

    Parts lie in memory as a cut leaves them, or packed as a shard is.
    """
    instruction = lowered(sample.site, rule, way, sizes)
    pairs = zip(sample.operands, way.needs, strict=True)
    given = [parts_of(tensor, placements, sizes) for tensor, placements in pairs]
    outputs = sample.site.node.outputs
    made: list[Parts | None] = [None if r is None else {} for r in outputs]
    for at in itertools.product(*map(range, sizes)):
        world = {n: p[at].clone() if packed else p[at] for n, p in enumerate(given)}
        with Kernels():
            compute(instruction, at)(world)
        for parts, ref in zip(made, outputs, strict=True):
            if parts is not None and ref is not None:
                parts[at] = world[ref.id]
    return made


def lowered(site: Site, rule: Sharding, way: Way, sizes: Sequence[int]) -> Compute:
    """The instruction for one operator whose values lie as a way says."""
    node, metas = site.node, [*site.inputs, *site.outputs]
    values = {
        n: Value(Ref(n), meta, placements, n)
        for n, (meta, placements) in enumerate(
            zip(metas, [*way.needs, *way.results], strict=True)
        )
        if meta is not None
    }
    operands = tuple(values[n] for n in range(len(site.inputs)))
    step = Step(node.op, node.args, node.kwargs, operands, node.outputs, "", rule)
    (instruction,) = lower(Placed(tuple(sizes), operands, (step,), values, ()))
    assert isinstance(instruction, Compute)
    return instruction


def check(sample: Sample, rule: Sharding, sizes: Sequence[int]) -> int:
    """Compare every way with the plain call.

    Returns:
        The number of ways.
    """
    admitted = ways(sample.site, rule, sizes)
    for way, packed in itertools.product(admitted, (False, True)):
        try:
            made = compute_in_parts(sample, rule, way, sizes, packed)
            for n, parts in enumerate(made):
                if parts is not None:
                    check_result(sample, n, parts, way.results[n])
        except Exception as error:
            raise AssertionError(f"{describe(sample)}, {sizes}: {way}") from error
    return len(admitted)


def check_result(sample: Sample, n: int, parts: Parts, placed: Placements) -> None:
    meta, wanted = sample.site.outputs[n], sample.results[n]
    assert meta is not None
    for at, part in parts.items():
        assert part.dtype == meta.dtype
        assert tuple(part.shape) == local_shape(meta.shape, placed, at)
    single = any(m.dtype == torch.float32 for m in (*sample.site.inputs, meta))
    found = together(parts, placed)
    assert_same(found.contiguous(), wanted.contiguous(), 1e-5 if single else None)


def describe(sample: Sample) -> str:
    operands = ", ".join(map(str, sample.site.inputs))
    return f"{sample.site.node.op} {sample.site.node.args} of {operands}"


# --- every rule -----------------------------------------------------------------------


def ruled(op: Any) -> Iterator[tuple[Sample, Sharding]]:
    """The samples of an operator that have a rule."""
    for made in SAMPLES[op]:
        sample = sample_of(op, made)
        rule = _rules.find(sample.site)
        if rule is not None:
            yield sample, rule


@pytest.mark.parametrize("op", SAMPLES, ids=str)
def test_parts_make_the_whole(op: Any) -> None:
    for sample, rule in ruled(op):
        for sizes in MESHES:
            check(sample, rule, sizes)


def test_every_rule_has_a_sample() -> None:
    assert not {*_rules.RULES} - {*SAMPLES}


def test_samples_split_every_factor() -> None:
    for op in SAMPLES:
        for sample, rule in ruled(op):
            missed = splittable(rule) - split_factors(sample.site, rule)
            assert not missed, describe(sample)


def splittable(rule: Sharding) -> set[str]:
    """Factors that may be split: not whole, and the first of all dims that they cut."""
    values = (*rule.inputs, *filter(None, rule.outputs))
    dims = [[f for f in dim if rule.sizes[f] > 1] for value in values for dim in value]
    first = {f for dim in dims for f in dim[:1]}
    return first - {f for dim in dims for f in dim[1:]} - rule.whole


def split_factors(site: Site, rule: Sharding) -> set[str]:
    """Factors that are split in some way on some number of ranks."""
    return {
        cut[0]
        for ranks in (2, 3, 4)
        for way in ways(site, rule, [ranks])
        for dims, (placement,) in zip(
            (*rule.inputs, *rule.outputs), (*way.needs, *way.results), strict=True
        )
        if dims is not None and isinstance(placement, Split)
        if (cut := rule.factor_of(dims, placement))
    }


def test_samples_split_every_operator() -> None:
    split = {op for op in SAMPLES for s, r in ruled(op) if split_factors(s.site, r)}
    assert {*SAMPLES} <= split


def test_samples_keep_sums_pending() -> None:
    linear = {op for op in SAMPLES for _, rule in ruled(op) if rule.linear}
    pending = {
        op
        for op in linear
        for sample, rule in ruled(op)
        for way in ways(sample.site, rule, [2])
        if (SUM,) in way.needs
    }
    assert linear - pending == set()


# --- the check itself -----------------------------------------------------------------

WRONG: dict[str, tuple[Any, Call, Any]] = {
    "a result on another dimension": (
        aten.mm.default,
        call(x(6, 6), x(6, 6)),
        pattern("m k, k n -> n m"),
    ),
    "a sum for a maximum": (
        aten.amax.default,
        call(x(5, 3), [0]),
        reduction("sum"),
    ),
    "a maximum for a sum": (
        aten.sum.dim_IntList,
        call(x(5, 3), [0]),
        reduction("max"),
    ),
    "parts of what is normalised": (
        aten._softmax.default,
        call(x(5, 3), 1, False),
        lambda site: site.make([["a", "b"]], [["a", "b"]]),
    ),
    "sums in what is not linear": (
        aten.exp.default,
        call(x(5, 3)),
        lambda site: site.make([["a", "b"]], [["a", "b"]], linear=FIRST),
    ),
    "a bias on every rank": (
        aten.addmm.default,
        call(x(3), x(5, 7), x(7, 3)),
        pattern("n, m k, k n -> m n"),
    ),
    "lengths of the whole": (
        aten.expand.default,
        call(x(5, 1), [5, 3]),
        lambda site: site.make([["a", ()]], [["a", "b"]]),
    ),
    "indices of parts": (
        aten.argmax.default,
        call(x(5, 3), 0),
        lambda site: site.make([["w", "b"]], [["b"]], reduce={"w": "max"}),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found(name: str) -> None:
    op, made, rule = WRONG[name]
    sample = sample_of(op, made)
    with pytest.raises(AssertionError, match=str(op)):
        check(sample, rule(sample.site), (2,))


def test_a_sum_of_shares_is_the_value() -> None:
    value = x(5, 3)
    for placements in (
        (SUM, Split(0, 3)),
        (Split(1, 2), SUM),
        (SUM, SUM),
        (WHOLE, SUM),
    ):
        parts = parts_of(value, placements, (2, 2))
        assert len(parts) == 4
        assert_same(together(parts, placements), value)


def test_parts_that_differ_are_no_whole() -> None:
    parts = {(0,): x(5), (1,): x(5)}
    with pytest.raises(AssertionError):
        together(parts, (WHOLE,))
