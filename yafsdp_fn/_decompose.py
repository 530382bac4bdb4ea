"""Operators that are taken apart while a step is traced, one line a rule.

An operator is here because it mixes elements of the whole batch with what stays local
(a mean, a variance, a loss with its weights): taken apart, the sum over the batch
becomes visible and is the only thing that is communicated; or because it makes a
constant out of the shape of another value.
"""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from ._errors import TraceError
from ._lines import user_line
from ._torch import get_decompositions

aten = torch.ops.aten
Dims = list[int] | int | None

# --- constants ------------------------------------------------------------------------


_DENSE = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def _like(value: float) -> Callable[..., torch.Tensor]:
    return lambda x, **options: _full_like(x, value, **options)


def _new(value: float) -> Callable[..., torch.Tensor]:
    return lambda x, size, **options: _full(x, size, value, options)


def _full(x: torch.Tensor, size: Any, value: Any, options: Any) -> torch.Tensor:
    dtype, device = options.get("dtype"), options.get("device")
    return torch.full(size, value, dtype=dtype or x.dtype, device=device or x.device)


def _full_like(x: torch.Tensor, value: Any, **options: Any) -> torch.Tensor:
    """A constant that lies in memory as `x` does."""
    if x.is_contiguous() or options.get("memory_format") in _DENSE:
        return _full(x, x.shape, value, options)
    order = sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)
    made = _full(x, [x.shape[d] for d in order], value, options)
    return made.permute([order.index(d) for d in range(x.dim())])


def _new_full(x: torch.Tensor, size: Any, value: Any, **options: Any) -> torch.Tensor:
    return _full(x, size, value, options)


def _new_strided(x: torch.Tensor, size: Any, _: Any, **options: Any) -> torch.Tensor:
    return _full(x, size, 0, options)


# --- views ----------------------------------------------------------------------------


def _squeeze(x: torch.Tensor, dims: Any = None) -> torch.Tensor:
    """Names the dimensions: those of length one here, not those of a rank's part."""
    listed = range(x.dim()) if dims is None else dims
    listed = [dims] if isinstance(dims, int) else listed
    gone = sorted({d % max(x.dim(), 1) for d in listed} & _ones(x))
    if isinstance(dims, list) and dims == gone:
        return NotImplemented
    return aten.squeeze.dims(x, gone) if gone else aten.alias(x)


def _channel_shuffle(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


def _cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Without the empty 1-D tensors that torch permits, as a cache before its use."""
    kept = [t for t in tensors if tuple(t.shape) != (0,)]
    if len(kept) in (0, len(tensors)):
        return NotImplemented
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return torch.cat(kept, dim).to(dtype)


def _ones(x: torch.Tensor) -> set[int]:
    return {d for d, length in enumerate(x.shape) if length == 1}


def _as_strided(
    x: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> torch.Tensor:
    """Elements of a dense value by their place in memory, as a lookup.

    A rank's part lies in memory in another way than the whole.
    """
    first = x.storage_offset() if storage_offset is None else storage_offset
    if (
        first == x.storage_offset()
        and x.is_contiguous()
        and _is_reshape(x, size, stride)
    ):
        return x.reshape(size)
    last = first + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    order = sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)
    packed = x.permute(order)
    inside = first >= x.storage_offset() and last < x.storage_offset() + x.numel()
    if 0 not in size and not (packed.is_contiguous() and inside):
        raise TraceError(
            f"{user_line(sys._getframe(1))}: as_strided reads memory outside of the "
            "tensor, or of a view that has gaps, which a rank's part does not hold. "
            "Index or reshape the tensor instead, or clone it first."
        )
    place = torch.full((), int(first - x.storage_offset()), dtype=torch.int64)
    for d, (length, step) in enumerate(zip(size, stride, strict=True)):
        steps = torch.arange(length, device=x.device) * step
        place = place + steps.view([-1 if e == d else 1 for e in range(len(size))])
    return packed.reshape(-1)[place]


def _is_reshape(x: torch.Tensor, size: Any, stride: Any) -> bool:
    """Whether these strides are those of as many elements, both contiguous."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return x.is_contiguous() and expected == x.numel()


# --- statistics -----------------------------------------------------------------------


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a sum of many such elements is taken."""
    low = dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if low else dtype


def _count(x: torch.Tensor, dims: Dims) -> int:
    if dims is None or dims == []:
        return x.numel()
    return math.prod(x.shape[d] for d in ((dims,) if isinstance(dims, int) else dims))


def _mean(
    x: torch.Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    dtype = dtype or x.dtype
    total = torch.sum(x, dim, keepdim, dtype=wide_dtype(dtype))  # type: ignore
    return (total / _count(x, dim)).to(dtype)


def _var(
    x: torch.Tensor, dim: Dims = None, *, correction: Any = 1, keepdim: bool = False
) -> torch.Tensor:
    wide = x.to(wide_dtype(x.dtype)) if not x.dtype.is_complex else x
    centred = wide - torch.mean(wide, dim, keepdim=True)
    squares = (
        (centred * centred.conj()).real if x.dtype.is_complex else centred.square()
    )
    total = torch.sum(squares, dim, keepdim)  # type: ignore
    divisor = max(_count(x, dim) - (1 if correction is None else correction), 0)
    result = total / divisor if divisor else total / torch.zeros_like(total)
    return result if x.dtype.is_complex else result.to(x.dtype)


def _var_mean(
    x: torch.Tensor, dim: Dims = None, *, correction: Any = 1, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    variance = _var(x, dim, correction=correction, keepdim=keepdim)
    return variance, torch.mean(x, dim, keepdim)  # type: ignore


def _std(x: torch.Tensor, dim: Dims = None, **options: Any) -> torch.Tensor:
    return torch.sqrt(_var(x, dim, **options))


def _vector_norm(
    x: torch.Tensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> torch.Tensor:
    """A norm as one sum (or extremum) between two elementwise operators."""
    dtype = dtype or x.dtype.to_real()
    size = torch.abs(x).to(wide_dtype(dtype))
    if x.numel() == 0 or (dim is None and x.dim() == 0):
        return NotImplemented
    dims = list(range(x.dim())) if dim is None or dim == [] else dim
    if math.isinf(ord):
        extreme = torch.amax if ord > 0 else torch.amin
        return extreme(size, dims, keepdim).to(dtype)  # type: ignore
    if ord == 0:
        return torch.sum(size != 0, dims, keepdim, dtype=dtype)
    powers = size.square() if ord == 2 else size if ord == 1 else size.pow(ord)
    total = torch.sum(powers, dims, keepdim)
    root = total.sqrt() if ord == 2 else total if ord == 1 else total.pow(1 / ord)
    return root.to(dtype)


def _all_dims(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x: op(x, list(range(x.dim())))


def _fused(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`addcmul` or `addcdiv` with the factor in its place among the arguments."""

    def each(x: Any, first: Any, second: Any, value: Any = 1) -> torch.Tensor:
        return x + value * op(first, second)

    return each


def _bound(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An extremum against a tensor or a number."""
    return lambda x, other: op(x, torch.as_tensor(other, dtype=x.dtype))


def _norm(x: torch.Tensor, ord: float = 2, dtype: Any = None) -> torch.Tensor:
    return torch.linalg.vector_norm(x, ord, dtype=dtype)


def _foreach(op: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    """A list operator as one operator for each element."""

    def each(*given: Any, **options: Any) -> Any:
        count = next(len(g) for g in given if isinstance(g, list | tuple))
        columns = [g if isinstance(g, list | tuple) else [g] * count for g in given]
        return [op(*row, **options) for row in zip(*columns, strict=True)]

    return each


_FOREACH: dict[str, Any] = {
    "_foreach_add": torch.add,
    "_foreach_sub": torch.sub,
    "_foreach_mul": torch.mul,
    "_foreach_div": torch.div,
    "_foreach_pow": torch.pow,
    "_foreach_lerp": torch.lerp,
    "_foreach_addcmul": _fused(torch.mul),
    "_foreach_addcdiv": _fused(torch.div),
    "_foreach_sqrt": torch.sqrt,
    "_foreach_neg": torch.neg,
    "_foreach_abs": torch.abs,
    "_foreach_exp": torch.exp,
    "_foreach_sign": torch.sign,
    "_foreach_reciprocal": torch.reciprocal,
    "_foreach_maximum": _bound(torch.maximum),
    "_foreach_minimum": _bound(torch.minimum),
    "_foreach_norm": _norm,
}

# --- losses ---------------------------------------------------------------------------


def _nll_loss_backward(
    grad: torch.Tensor,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """The gradient of the scores at the targets, scattered among zeros."""
    dim = min(scores.dim() - 1, 1)
    shape = (*scores.shape[:dim], 1, *scores.shape[dim + 1 :])
    index = target.reshape(shape)
    counts = index != ignored
    index = torch.where(counts, index, 0)
    if reduction == _MEAN:
        grad = grad / total_weight
    grad = grad.reshape(shape) if grad.numel() == index.numel() else grad.expand(shape)
    if weight is not None:
        columns = [scores.shape[dim] if d == dim else 1 for d in range(scores.dim())]
        grad = grad * weight.view(columns).expand(scores.shape).gather(dim, index)
    grad = torch.where(counts, -grad, 0)
    return torch.zeros_like(scores).scatter(dim, index, grad)


_MEAN = 1  # torch's number of the reduction


# --- the table ------------------------------------------------------------------------

_FROM_TORCH = (
    aten.nll_loss_forward,
    aten.nll_loss2d_forward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten.native_batch_norm_backward,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten.addmv,
    aten.addr,
)

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **get_decompositions(_FROM_TORCH),
    aten.as_strided.default: _as_strided,
    aten.cat.default: _cat,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.zeros_like.default: _like(0),
    aten.ones_like.default: _like(1),
    aten.empty_like.default: _like(0),
    aten.full_like.default: _full_like,
    aten.new_zeros.default: _new(0),
    aten.new_ones.default: _new(1),
    aten.new_empty.default: _new(0),
    aten.new_full.default: _new_full,
    aten.new_empty_strided.default: _new_strided,
    aten.fill.Scalar: _full_like,
    aten.zero.default: _like(0),
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
    aten.std.correction: _std,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
    aten.channel_shuffle.default: _channel_shuffle,
    aten.native_channel_shuffle.default: _channel_shuffle,
    aten.max.default: _all_dims(torch.amax),
    aten.min.default: _all_dims(torch.amin),
    **{
        getattr(getattr(aten, name), overload): _foreach(op)
        for name, op in _FOREACH.items()
        for overload in getattr(aten, name).overloads()
        if not overload.endswith(("out", "_"))
    },
}
