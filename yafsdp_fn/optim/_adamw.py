"""AdamW: one fused operator for all leaves, and the formula that it computes."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from ._leaves import (
    PyTree,
    aligned,
    check_given,
    counter,
    flatten,
    learnable,
    map_learnable,
    mirrored,
    root,
    working_dtype,
)
from ._numbers import (
    LearningRate,
    Number,
    as_operand,
    check_plain,
    check_rate,
    is_plain,
    rate_at,
)
from ._transform import GradientTransformation


class AdamWState(NamedTuple):
    """What AdamW remembers.

    Attributes:
        count: 0-dim int64 tensor, the number of updates so far.
        first_moment: a tree as the parameters, running mean of gradients; `None` for a
            leaf that is not floating.
        second_moment: the same, running mean of squared gradients.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> yf.optim.adamw(3e-4).init([torch.ones(2), torch.tensor(1)]).first_moment
        [tensor([0., 0.]), None]
    """

    count: Tensor  # type: ignore[assignment]  # optax's name; hides tuple.count
    first_moment: PyTree
    second_moment: PyTree


class _Row(NamedTuple):
    """One parameter with all that moves it: four tensors of one shape."""

    param: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor


class _Step(NamedTuple):
    """The numbers of one update, the `number`-th, counted from 1."""

    number: Tensor
    rate: Number
    b1: float
    b2: float
    eps: float
    weight_decay: float


# What a row becomes: its parameter, first and second moment after the update.
_Moved: TypeAlias = tuple[Tensor, ...]


def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    fused: bool = True,
) -> GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101).

    The mathematics of `torch.optim.AdamW`. Complex leaves are moved as pairs of reals.
    Leaves of other dtypes, and leaves whose gradient is `None`, are left as they are;
    there is one step count for all leaves.

    Args:
        learning_rate: size of a step: a Python number, a 0-dim tensor, a live number,
            or a schedule, called with the 0-dim int64 count of earlier updates, from 0.
        b1: decay of the first moment per update, in [0, 1).
        b2: decay of the second moment per update, in [0, 1).
        eps: added to the root of the second moment, in the gradient's unit.
        weight_decay: share of the parameter taken off per update and learning rate.
        fused: use torch's fused operator, one call for all leaves of a dtype and device
            (leaves that are not contiguous go by the formula). `False` writes plain
            operators, which `torch.func.grad` and `vmap` can pass through.

    Returns:
        A transformation with an `AdamWState`. Its `update` needs `params`; updates have
        the parameters' structure, shapes and dtypes.

    Raises:
        ArgumentError: a number is out of its range; in `update`, trees do not match.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> optimiser = yf.optim.adamw(0.1, weight_decay=0.0)
        >>> params = {"weight": torch.tensor([1.0, 1.0])}
        >>> grads = {"weight": torch.tensor([5.0, -0.2])}
        >>> updates, state = optimiser.update(grads, optimiser.init(params), params)
        >>> updates
        {'weight': tensor([-0.1000,  0.1000])}
        >>> state.count
        tensor(1)
    """
    check_rate(learning_rate)
    check_plain("b1", b1, 0, 1, "b1=0.9")
    check_plain("b2", b2, 0, 1, "b2=0.999")
    check_plain("eps", eps, 0, math.inf, "eps=1e-8")
    check_plain("weight_decay", weight_decay, 0, math.inf, "weight_decay=1e-2")

    def init(params: PyTree) -> AdamWState:
        first, second = (map_learnable(torch.zeros_like, params) for _ in range(2))
        return AdamWState(counter(params), first, second)

    def update(
        grads: PyTree, state: AdamWState, params: PyTree = None
    ) -> tuple[PyTree, AdamWState]:
        rate = rate_at(learning_rate, state.count)
        step = _Step(state.count + 1, rate, b1, b2, eps, weight_decay)
        return _update(step, fused, grads, state, params)

    return GradientTransformation(init, update)


def _update(
    step: _Step, fused: bool, grads: PyTree, state: AdamWState, params: PyTree
) -> tuple[PyTree, AdamWState]:
    check_given(params, grads, "adamw")
    leaves, spec = flatten(params)
    gradients = aligned("grads", grads, params)
    updates: list[Tensor | None] = [None] * len(leaves)
    firsts = mirrored("state.first_moment", state.first_moment, params)
    seconds = mirrored("state.second_moment", state.second_moment, params)
    rows = {
        index: _row(*row)
        for index, row in enumerate(
            zip(leaves, gradients, firsts, seconds, strict=True)
        )
        if learnable(row[0]) and row[1] is not None
    }
    for index, (param, first, second) in _move(rows, step, fused).items():
        updates[index] = _as_kind(param - rows[index].param, leaves[index])
        firsts[index] = _as_kind(first, leaves[index])
        seconds[index] = _as_kind(second, leaves[index])
    trees = [optree.tree_unflatten(spec, c) for c in (updates, firsts, seconds)]
    return trees[0], AdamWState(step.number, trees[1], trees[2])


def _row(param: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> _Row:
    grad = grad.to(param.dtype)
    return _Row(*map(_as_real, (param, grad, first, second)))


def _as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of reals, which is what the moments are taken of."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _as_kind(tensor: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(tensor) if like.is_complex() else tensor


# --- how rows move ---------------------------------------------------------------


def _move(rows: dict[int, _Row], step: _Step, fused: bool) -> dict[int, _Moved]:
    """All rows after the update: one call for those that the operator can take."""
    moved: dict[int, _Moved] = {}
    for (dtype, device, by_operator), indices in _groups(rows, step, fused).items():
        rate = as_operand(step.rate, working_dtype(dtype), device)
        move = _by_operator if by_operator else _by_formula
        group = move([rows[index] for index in indices], step, rate)
        moved.update(zip(indices, group, strict=True))
    return moved


def _groups(
    rows: dict[int, _Row], step: _Step, fused: bool
) -> dict[tuple[torch.dtype, torch.device, bool], list[int]]:
    groups: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}
    for index, row in rows.items():
        by_operator = fused and _fusable(row, step.rate)
        key = (row.param.dtype, row.param.device, by_operator)
        groups.setdefault(key, []).append(index)
    return groups


def _fusable(row: _Row, rate: Number) -> bool:
    """Whether the fused operator gives the right numbers for this row.

    It walks the memory of its operands side by side, whatever their strides are, so
    all must be contiguous; and off the CPU it reads a live learning rate in float32.
    """
    exact = row.param.dtype != torch.float64 or row.param.device.type == "cpu"
    dtypes = {tensor.dtype for tensor in row}
    return row.param.is_contiguous() and len(dtypes) == 1 and (exact or is_plain(rate))


def _by_operator(
    rows: Sequence[_Row], step: _Step, rate: float | Tensor
) -> list[_Moved]:
    columns = [[t.contiguous() for t in column] for column in zip(*rows, strict=True)]
    # The operator takes the count as float32, exact up to 2^24 updates.
    count = step.number.to(device=rows[0].param.device, dtype=torch.float32)
    operator = torch.ops.aten._fused_adamw
    overload = operator.tensor_lr if isinstance(rate, Tensor) else operator.default
    params, _, firsts, seconds, _ = overload(
        *columns,
        [],
        [count] * len(rows),
        lr=rate,
        beta1=step.b1,
        beta2=step.b2,
        weight_decay=step.weight_decay,
        eps=step.eps,
        amsgrad=False,
        maximize=False,
    )
    return list(zip(params, firsts, seconds, strict=True))


def _by_formula(
    rows: Sequence[_Row], step: _Step, rate: float | Tensor
) -> list[_Moved]:
    return [_formula(row, step, rate) for row in rows]


def _formula(row: _Row, step: _Step, rate: float | Tensor) -> _Moved:
    work = working_dtype(row.param.dtype)
    param, grad, first, second = (tensor.to(work) for tensor in row)
    # Both corrections in float64: 1 - 0.999 in float32 has four digits.
    count = step.number.to(device=param.device, dtype=torch.float64)
    correction1, correction2 = ((1 - b**count).to(work) for b in (step.b1, step.b2))
    first = torch.lerp(first, grad, 1 - step.b1)
    second = torch.addcmul(second * step.b2, grad, grad, value=1 - step.b2)
    spread = root(second) / correction2.sqrt() + step.eps
    decayed = param * (1 - rate * step.weight_decay)
    param = decayed - (rate / correction1) * first / spread
    moved = zip((param, first, second), (row.param, row.first, row.second), strict=True)
    return tuple(new.to(old.dtype) for new, old in moved)
