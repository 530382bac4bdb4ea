"""Operators in the form that a part of a value needs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

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

    reduce.__name__ = reduce.__qualname__ = f"local_{op}".replace("aten.", "")
    return reduce


def _lowest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return False
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _contiguous(op: Any) -> Callable[..., Any]:
    """A fused operator that walks raw memory, on operands that lie alike."""

    def fused(*args: Any, **kwargs: Any) -> Any:
        same = [
            [t.contiguous() for t in a] if isinstance(a, list | tuple) else a
            for a in args
        ]
        return op(*same, **kwargs)

    fused.__name__ = fused.__qualname__ = f"local_{op}".replace("aten.", "")
    return fused


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
    aten._fused_adamw.default: _contiguous(aten._fused_adamw.default),
    aten._fused_adamw.tensor_lr: _contiguous(aten._fused_adamw.tensor_lr),
    aten._fused_adam.default: _contiguous(aten._fused_adam.default),
    aten._fused_adam.tensor_lr: _contiguous(aten._fused_adam.tensor_lr),
}
