"""Functions of torch that would read a value, or hide an edit, when they are traced.

Each is replaced by one of the same result in operators that a trace can hold, or by the
error that says what to write instead.
"""

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.nn import functional

from ._decompose import wide_dtype
from ._errors import TraceError
from ._lines import user_line

READ = (
    "{line}: the step reads the value of a tensor (.item(), float(), bool(), `if`), "
    "which is not known while the step is traced. Use torch.where for a choice "
    "between values, or return the tensor as a metric and read it outside."
)


def _read(*_: Any, **__: Any) -> NoReturn:
    raise TraceError(READ.format(line=user_line(sys._getframe(1))))


def _one_hot(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 0:
        raise TraceError(
            f"{user_line(sys._getframe(1))}: one_hot without num_classes reads the "
            "largest index, which is not known while the step is traced. Write "
            "one_hot(index, num_classes)."
        )
    classes = torch.arange(num_classes, device=index.device)
    return (index.unsqueeze(-1) == classes).to(torch.int64)


def _batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Batch normalisation in plain operators; torch's own hides that it edits."""
    shape = [1, -1, *[1] * (x.dim() - 2)]
    wide = x.to(wide_dtype(x.dtype))
    if training or running_mean is None or running_var is None:
        dims = [d for d in range(x.dim()) if d != 1]
        variance, mean = torch.var_mean(wide, dims, correction=0)
        _update(running_mean, mean, momentum)
        count = x.numel() // x.shape[1]
        _update(running_var, variance * (count / max(count - 1, 1)), momentum)
    else:
        mean, variance = running_mean, running_var
    centred = wide - mean.to(wide.dtype).view(shape)
    result = centred * torch.rsqrt(variance.to(wide.dtype) + eps).view(shape)
    if weight is not None:
        result = result * weight.view(shape)
    return (result if bias is None else result + bias.view(shape)).to(x.dtype)


def _update(running: torch.Tensor | None, found: torch.Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(momentum * found.detach().to(running.dtype))


def _getitem(x: torch.Tensor, index: Any) -> torch.Tensor:
    """Indexing; torch reads an index that is a 0-dim integer tensor."""
    items = list(index) if isinstance(index, tuple) else [index]
    dim = 0
    for n, item in enumerate(items):
        if item is Ellipsis:
            dim = x.dim() - sum(map(_consumed, items[n + 1 :]))
        elif _is_position(item):
            place = torch.where(item < 0, item + x.shape[dim], item)
            x = x.index_select(dim, place.reshape(1))
            items[n] = 0
        dim += _consumed(item)
    return x[tuple(items) if isinstance(index, tuple) else items[0]]


def _consumed(item: Any) -> int:
    """The dimensions that one item of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, torch.Tensor) and item.dtype == torch.bool
    return item.dim() if is_mask else 1


def _is_position(item: Any) -> bool:
    return (
        isinstance(item, torch.Tensor)
        and item.dim() == 0
        and item.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
    )


def _setitem(x: torch.Tensor, index: Any, value: Any) -> None:
    """Assignment; torch reads an index that is a 0-dim integer tensor."""
    torch.Tensor.__setitem__(
        x, index.reshape(1) if _is_position(index) else index, value
    )


def _in_place(functional: Any) -> Callable[..., None]:
    """A fused optimiser that edits, of one that returns what it makes.

    torch's functionalisation takes an empty list of tensors for one that it must not
    edit.
    """

    def edit(*lists: Any, **options: Any) -> None:
        made = functional(*lists, **options)
        for old, new in zip(lists, made, strict=False):
            for edited, tensor in zip(old, new, strict=True):
                edited.copy_(tensor)

    return edit


def _set(x: torch.Tensor, *_: Any, **__: Any) -> NoReturn:
    raise TraceError(
        f"{user_line(sys._getframe(1))}: set_ gives a tensor other memory, so the step "
        "is no pure function. Use the other tensor itself."
    )


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    functional.one_hot: _one_hot,
    functional.batch_norm: _batch_norm,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.__setitem__: _setitem,
    torch.Tensor.set_: _set,
    torch._fused_adam_: _in_place(torch.ops.aten._fused_adam),
    torch._fused_adamw_: _in_place(torch.ops.aten._fused_adamw),
    torch.Tensor.__deepcopy__: lambda x, memo: x.clone(),
    torch.Tensor.__format__: lambda x, spec: _read() if spec else repr(x),
    **dict.fromkeys(
        (
            torch.Tensor.tolist,
            torch.Tensor.numpy,
            torch.Tensor.__array__,
            torch.Tensor.__dlpack__,
            torch.Tensor.data_ptr,
        ),
        _read,
    ),
}
