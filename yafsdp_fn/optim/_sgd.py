"""Stochastic gradient descent with momentum."""

import math
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from .._errors import ArgumentError
from ._leaves import (
    PyTree,
    aligned,
    check_given,
    counter,
    flatten,
    learnable,
    map_learnable,
    mirrored,
    working_dtype,
)
from ._numbers import (
    LearningRate,
    Number,
    as_operand,
    check_plain,
    check_rate,
    rate_at,
)
from ._transform import GradientTransformation


class SGDState(NamedTuple):
    """What SGD remembers.

    Attributes:
        count: 0-dim int64 tensor, the number of updates so far.
        momentum: a tree as the parameters, decayed sum of gradients, `None` for a leaf
            that is not floating; or only `None` if SGD has no momentum.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> yf.optim.sgd(0.1, momentum=0.9).init([torch.ones(2)])
        SGDState(count=tensor(0), momentum=[tensor([0., 0.])])
    """

    count: Tensor  # type: ignore[assignment]  # optax's name; hides tuple.count
    momentum: PyTree


class _Step(NamedTuple):
    """The numbers of one update."""

    rate: Number
    momentum: float
    nesterov: bool
    weight_decay: float


def sgd(
    learning_rate: LearningRate,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> GradientTransformation:
    """Gradient descent with momentum (Polyak 1964; Nesterov 1983).

    The mathematics of `torch.optim.SGD` without dampening. Leaves that are neither
    floating nor complex, and leaves whose gradient is `None`, are left as they are.

    Args:
        learning_rate: size of a step: a Python number, a 0-dim tensor, a live number,
            or a schedule, called with the 0-dim int64 count of earlier updates, from 0.
        momentum: decay of the sum of gradients per update, in [0, 1).
        nesterov: step along the gradient that the momentum leads to.
        weight_decay: share of the parameter that is added to its gradient.

    Returns:
        A transformation with an `SGDState`. Its `update` needs `params` only for weight
        decay; updates have the gradients' structure, shapes and dtypes.

    Raises:
        ArgumentError: a number is out of its range; in `update`, trees do not match.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> optimiser = yf.optim.sgd(0.5, momentum=0.9)
        >>> grads = {"weight": torch.tensor([2.0, -4.0])}
        >>> state = optimiser.init(grads)
        >>> updates, state = optimiser.update(grads, state)
        >>> updates, state = optimiser.update(grads, state)
        >>> updates
        {'weight': tensor([-1.9000,  3.8000])}
    """
    check_rate(learning_rate)
    check_plain("momentum", momentum, 0, 1, "momentum=0.9")
    check_plain("weight_decay", weight_decay, 0, math.inf, "weight_decay=1e-4")
    if nesterov and momentum == 0:
        raise ArgumentError(
            "nesterov=True with momentum=0 looks nowhere ahead."
            " Write momentum=0.9, or nesterov=False."
        )

    def init(params: PyTree) -> SGDState:
        sums = map_learnable(torch.zeros_like, params) if momentum else None
        return SGDState(counter(params), sums)

    def update(
        grads: PyTree, state: SGDState, params: PyTree = None
    ) -> tuple[PyTree, SGDState]:
        rate = rate_at(learning_rate, state.count)
        step = _Step(rate, momentum, nesterov, weight_decay)
        # Without weight decay the gradients themselves say all there is to know.
        params = grads if params is None and weight_decay == 0 else params
        return _update(step, grads, state, params)

    return GradientTransformation(init, update)


def _update(
    step: _Step, grads: PyTree, state: SGDState, params: PyTree
) -> tuple[PyTree, SGDState]:
    check_given(params, grads, "sgd with weight_decay")
    leaves, spec = flatten(params)
    gradients = aligned("grads", grads, params)
    updates: list[Tensor | None] = [None] * len(leaves)
    sums = list(updates)
    if step.momentum:
        sums = mirrored("state.momentum", state.momentum, params)
    for index, (param, grad) in enumerate(zip(leaves, gradients, strict=True)):
        if learnable(param) and grad is not None:
            updates[index], sums[index] = _move(step, param, grad, sums[index])
    moved = optree.tree_unflatten(spec, updates)
    momentum = optree.tree_unflatten(spec, sums) if step.momentum else None
    return moved, SGDState(state.count + 1, momentum)


def _move(
    step: _Step, param: Tensor, grad: Tensor, momentum: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The update of one leaf and its new sum, both computed in at least float32."""
    work = working_dtype(param.dtype)
    rate = as_operand(step.rate, work, param.device)
    direction = grad.to(param.dtype).to(work)
    if step.weight_decay:
        direction = direction + step.weight_decay * param.to(work)
    if momentum is None:
        return (-rate * direction).to(param.dtype), None
    total = step.momentum * momentum.to(work) + direction
    direction = direction + step.momentum * total if step.nesterov else total
    return (-rate * direction).to(param.dtype), total.to(momentum.dtype)
