"""How an operator writes its results where they are wanted.

Most ATen operators have an overload that writes into tensors that are given. Where
torch only generates it from the one that allocates, it would copy, and is not used.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._graph import map_leaves
from ._local_ops import LOCAL_OPS
from ._torch import is_operator, out_overload

aten = torch.ops.aten
Writer = Callable[..., Any]  # called with the outputs first

# --- into given memory ----------------------------------------------------------------


def writer(op: Any) -> Writer | None:
    """A function that computes an operator into given tensors, if there is one.

    It takes a list of the results' places, then the operator's arguments.
    """
    return _writer(op) if is_operator(op) else None  # a cache would keep a region


@functools.cache
def _writer(op: Any) -> Writer | None:
    if op in _WRITERS:
        return _WRITERS[op]
    op = _SAME_AS.get(op, op)
    if op not in _TRUSTED and torch.Tag.pointwise not in getattr(op, "tags", ()):
        return None
    found = out_overload(op)
    if found is None:
        return None
    overload, name = found
    if op in _WITH_FACTOR:
        return _scaled(overload)
    return lambda outs, *args, **kwargs: overload(*args, **kwargs, **{name: outs[0]})


def _scaled(overload: Any) -> Writer:
    """A sum of which the factor may be given by position."""

    def write(outs: Sequence[torch.Tensor], x: Any, other: Any, alpha: Any = 1) -> None:
        overload(x, other, alpha=alpha, out=outs[0])

    return write


def _copy(outs: Sequence[torch.Tensor], x: torch.Tensor, **_: Any) -> None:
    outs[0].copy_(x)


def _reshape(outs: Sequence[torch.Tensor], x: torch.Tensor, shape: Any) -> None:
    (out,) = outs
    if out.is_contiguous():
        out.view(x.shape).copy_(x)
    else:
        out.copy_(x.reshape(shape))


def _embedding(
    outs: Sequence[torch.Tensor], weight: torch.Tensor, index: torch.Tensor, *_: Any
) -> None:
    (out,) = outs
    rows = out.view(-1, *weight.shape[1:])
    torch.index_select(weight, 0, index.reshape(-1), out=rows)


def _fill(outs: Sequence[torch.Tensor], size: Any, value: Any, **_: Any) -> None:
    outs[0].fill_(value)


def _scalar(outs: Sequence[torch.Tensor], value: Any, **_: Any) -> None:
    outs[0].fill_(value)


def _overwriting(in_place: Any) -> Writer:
    """An operator that edits a copy of its first operand, or the operand itself."""

    def write(
        outs: Sequence[torch.Tensor], x: torch.Tensor, *args: Any, **kw: Any
    ) -> None:
        (out,) = outs
        if out.data_ptr() == x.data_ptr():
            in_place(out, *args, **kw)
        else:
            in_place(out.copy_(x), *args, **kw)

    return write


OVERWRITES: dict[Any, Any] = {
    aten.scatter.value: aten.scatter_.value,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
}

ROW_BY_ROW = {  # with the position of the dimension, which must be the last one
    aten._softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax.default: 1,
    aten._log_softmax_backward_data.default: 2,
}

_WRITERS: dict[Any, Writer] = {
    **{op: _overwriting(in_place) for op, in_place in OVERWRITES.items()},
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
    aten.reshape.default: _reshape,
    aten.embedding.default: _embedding,
    aten.full.default: _fill,
    aten.scalar_tensor.default: _scalar,
}

_TRUSTED = {  # beside those that work element by element
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.sum.dim_IntList,
    aten.cat.default,
    aten.gather.default,
    aten.index_select.default,
    aten.cumsum.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
}

_WITH_FACTOR = {aten.add.Tensor, aten.sub.Tensor}

_SAME_AS = {  # a number among the arguments is as good as a tensor
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}

# --- in place -------------------------------------------------------------------------

# Fused optimisers: the i-th list of results is what becomes of the i-th list of
# arguments; only parameters and moments change.
_UPDATES = {
    aten._fused_adamw.default: aten._fused_adamw_.default,
    aten._fused_adamw.tensor_lr: aten._fused_adamw_.tensor_lr,
    aten._fused_adam.default: aten._fused_adam_.default,
    aten._fused_adam.tensor_lr: aten._fused_adam_.tensor_lr,
}
_IN_PLACE = {LOCAL_OPS[op]: update for op, update in _UPDATES.items()}
_CONSTANT_LIST = 1  # the gradients


def updates(op: Any) -> bool:
    """Whether an operator is a fused optimiser, which can update its operands."""
    return op in _IN_PLACE or op in _UPDATES


def update(
    op: Any, args: Sequence[Any], kwargs: Any, given: Sequence[bool], own: bool = False
) -> list[Any]:
    """Compute a fused optimiser in place.

    Args:
        op: The optimiser.
        args: Its arguments, lists of tensors first.
        kwargs: Its keyword arguments.
        given: For every result whether the operand's memory may be overwritten.
        own: Whether the gradients that come out need memory of their own.

    Returns:
        The results, in one list.
    """
    lists, rest = [list(a) for a in args[:5]], args[5:]
    # With a scale, gradients are divided by it where they are.
    flags, apart = iter(given), own or kwargs.get("grad_scale") is not None
    for number, tensors in enumerate(lists):
        for n, tensor in enumerate(tensors):
            if next(flags) and tensor.is_contiguous():
                continue
            if number == _CONSTANT_LIST and not apart:
                tensors[n] = tensor.contiguous()
            else:  # the kernel walks raw memory
                tensors[n] = tensor.clone(memory_format=torch.contiguous_format)
    _IN_PLACE[op](*lists, *map_leaves(_contiguous, rest), **kwargs)
    return [tensor for tensors in lists for tensor in tensors]


def _contiguous(leaf: Any) -> Any:
    return leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf
