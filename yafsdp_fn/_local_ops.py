"""Operators in the form that a part of a value needs."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ._graph import map_leaves
from ._torch import onednn_linear

aten = torch.ops.aten


def _extreme(op: Any, limit: Callable[[torch.dtype], Any]) -> Callable[..., Any]:
    """An extremum that is the operation's identity where a rank holds no element."""

    def reduce(
        x: torch.Tensor, dims: Sequence[int] = (), keepdim: bool = False
    ) -> torch.Tensor:
        listed = list(dims) or list(range(x.dim()))
        if all(x.shape[d] for d in listed):
            return op(x, listed, keepdim)
        cut = {d % x.dim() for d in listed}
        kept = [
            1 if d in cut else n
            for d, n in enumerate(x.shape)
            if keepdim or d not in cut
        ]
        return x.new_full(kept, limit(x.dtype))

    return _named(reduce, op)


def _lowest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return False
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _contiguous(op: Any) -> Callable[..., Any]:
    """A kernel that walks raw memory, on operands that lie alike."""

    def packed(*args: Any, **kwargs: Any) -> Any:
        return op(*map_leaves(_packed, args), **kwargs)

    return _named(packed, op)


def _packed(leaf: Any) -> Any:
    return leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf


def _also_of_nothing(op: Any) -> Callable[..., Any]:
    """A kernel that refuses empty operands: computed on one element, and cut off."""

    def filled(*args: Any, **kwargs: Any) -> Any:
        first = args[0]
        if first.numel():
            return op(*args, **kwargs)
        cut = tuple(slice(0) if n == 0 else slice(None) for n in first.shape)
        return map_leaves(
            lambda x: x[cut], op(*map_leaves(_one_for_none, args), **kwargs)
        )

    return _named(filled, op)


def _one_for_none(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.new_zeros([n or 1 for n in leaf.shape])
    return leaf


def _named(function: Callable[..., Any], op: Any) -> Callable[..., Any]:
    """A name that a program's listing shows, the same in all processes."""
    function.__name__ = function.__qualname__ = f"local_{op}".replace("aten.", "")
    return function


def local_attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Fused attention; its kernel divides by the number of heads, also by none."""
    if query.numel():
        return _FORWARD(query, *args, **kwargs)
    low = query.dtype in (torch.float16, torch.bfloat16)
    lengths = query.new_zeros(query.shape[:3], dtype=torch.float32 if low else None)
    return torch.zeros_like(query), lengths


def local_attention_backward(grad: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Its gradient."""
    if grad.numel():
        return _BACKWARD(grad, *args, **kwargs)
    return tuple(torch.zeros_like(operand) for operand in args[:3])


def onednn_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A matrix product of float32 by oneDNN, at full precision."""
    if a.numel() and b.numel():
        return onednn_linear(a, b.t(), None, "none", [], "")
    return torch.mm(a, b)


@functools.cache
def prefers_onednn() -> bool:
    """Whether oneDNN's float32 products are faster here than torch's own.

    They are, twice, on AMD's processors with AVX-512, where torch's library takes a
    path for older ones; elsewhere the two are equal.
    """
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in described and "avx512f" in described


_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# A rank's part may lie in memory in another way than the whole would (a gathered value
# is contiguous even if the leaf was not), so a view becomes a view where possible.
LOCAL_OPS: dict[Any, Callable[..., Any]] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.amax.default: _extreme(aten.amax.default, _lowest),
    aten.amin.default: _extreme(aten.amin.default, _highest),
    _FORWARD: local_attention,
    _BACKWARD: local_attention_backward,
    **{
        op: _contiguous(op)
        for op in (
            aten._fused_adamw.default,
            aten._fused_adamw.tensor_lr,
            aten._fused_adam.default,
            aten._fused_adam.tensor_lr,
            aten.native_layer_norm_backward.default,
            aten._fused_rms_norm_backward.default,
        )
    },
    **{
        op: _also_of_nothing(op)
        for op in (
            aten.avg_pool2d.default,
            aten.avg_pool2d_backward.default,
            aten.avg_pool3d.default,
            aten.avg_pool3d_backward.default,
            aten.max_pool2d_with_indices.default,
            aten.max_pool2d_with_indices_backward.default,
            aten.max_pool3d_with_indices.default,
            aten.max_pool3d_with_indices_backward.default,
            aten._adaptive_avg_pool2d.default,
            aten._adaptive_avg_pool2d_backward.default,
            aten.reflection_pad1d.default,
            aten.reflection_pad1d_backward.default,
            aten.reflection_pad2d.default,
            aten.reflection_pad2d_backward.default,
            aten.replication_pad1d.default,
            aten.replication_pad1d_backward.default,
            aten.replication_pad2d.default,
            aten.replication_pad2d_backward.default,
            aten.upsample_nearest1d.default,
            aten.upsample_linear1d.default,
            aten.upsample_nearest2d.default,
            aten.upsample_bilinear2d.default,
            aten.upsample_bicubic2d.default,
            aten._fft_r2c.default,
            aten._fft_c2c.default,
            aten._fft_c2r.default,
        )
    },
}
