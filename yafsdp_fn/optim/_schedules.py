"""Schedules: the learning rate as a function of the count of updates, branch-free."""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from .._errors import ArgumentError
from ._numbers import Number, as_operand, check_number

Schedule: TypeAlias = Callable[[Tensor | int], Tensor]


def constant(value: Number) -> Schedule:
    """The same value at every step.

    Args:
        value: a Python number, a 0-dim tensor, or a live number.

    Returns:
        A function of the step (a 0-dim tensor or an int) to a 0-dim float32 tensor.

    Raises:
        ArgumentError: `value` is negative or not one number.

    Example:
        >>> import yafsdp_fn as yf
        >>> yf.optim.constant(0.5)(7)
        tensor(0.5000)
    """
    check_number("value", value, 0, math.inf, "value=3e-4")
    return lambda step: _lift(value, _as_time(step))


def warmup_cosine(
    peak: Number, warmup_steps: int, total_steps: int, end: Number = 0.0
) -> Schedule:
    """Linear rise, then half a cosine down (Loshchilov and Hutter, arXiv:1608.03983).

    Args:
        peak: value at `warmup_steps`: a Python number, a 0-dim tensor, a live number.
        warmup_steps: updates of the rise, which starts at 0; may be 0.
        total_steps: updates until `end` is reached, rise included.
        end: value from `total_steps` on.

    Returns:
        A function of the step (a 0-dim tensor or an int) to a 0-dim float32 tensor.

    Raises:
        ArgumentError: a number is negative, or no steps are left after the rise.

    Example:
        >>> import yafsdp_fn as yf
        >>> rate = yf.optim.warmup_cosine(1.0, warmup_steps=2, total_steps=6, end=0.2)
        >>> [round(rate(step).item(), 2) for step in (0, 1, 2, 4, 6, 9)]
        [0.0, 0.5, 1.0, 0.6, 0.2, 0.2]
    """

    def fall(progress: Tensor) -> Tensor:
        return (1 + torch.cos(math.pi * progress)) / 2

    return _warmup(fall, peak, warmup_steps, total_steps, end)


def warmup_linear(
    peak: Number, warmup_steps: int, total_steps: int, end: Number = 0.0
) -> Schedule:
    """Linear rise, then linear fall (Devlin and others, arXiv:1810.04805).

    Args:
        peak: value at `warmup_steps`: a Python number, a 0-dim tensor, a live number.
        warmup_steps: updates of the rise, which starts at 0; may be 0.
        total_steps: updates until `end` is reached, rise included.
        end: value from `total_steps` on.

    Returns:
        A function of the step (a 0-dim tensor or an int) to a 0-dim float32 tensor.

    Raises:
        ArgumentError: a number is negative, or no steps are left after the rise.

    Example:
        >>> import yafsdp_fn as yf
        >>> rate = yf.optim.warmup_linear(1.0, warmup_steps=2, total_steps=6)
        >>> [round(rate(step).item(), 2) for step in (0, 1, 2, 3, 6, 9)]
        [0.0, 0.5, 1.0, 0.75, 0.0, 0.0]
    """
    return _warmup(lambda progress: 1 - progress, peak, warmup_steps, total_steps, end)


def _warmup(
    fall: Callable[[Tensor], Tensor],
    peak: Number,
    warmup_steps: int,
    total_steps: int,
    end: Number,
) -> Schedule:
    """A rise times a fall: each is 1 while the other moves, so nothing is chosen."""
    check_number("peak", peak, 0, math.inf, "peak=3e-4")
    check_number("end", end, 0, math.inf, "end=0.0")
    _check_steps(warmup_steps, total_steps)

    def schedule(step: Tensor | int) -> Tensor:
        time = _as_time(step)
        # No rise is a rise that was over before step 0.
        rise = ((time + (warmup_steps == 0)) / max(warmup_steps, 1)).clamp(0, 1)
        progress = ((time - warmup_steps) / (total_steps - warmup_steps)).clamp(0, 1)
        share = fall(progress)
        return rise * (_lift(peak, time) * share + _lift(end, time) * (1 - share))

    return schedule


def _check_steps(warmup_steps: int, total_steps: int) -> None:
    steps = (warmup_steps, total_steps)
    if not all(isinstance(count, int) for count in steps):
        raise ArgumentError(
            f"warmup_steps and total_steps are {steps}, but must be ints."
            " Write warmup_steps=100, total_steps=10_000."
        )
    if not 0 <= warmup_steps < total_steps:
        raise ArgumentError(
            f"warmup_steps={warmup_steps} must be at least 0 and less than"
            f" total_steps={total_steps}. Write warmup_steps=100, total_steps=10_000."
        )


def _as_time(step: Tensor | int) -> Tensor:
    return torch.as_tensor(step).to(torch.float32)


def _lift(value: Number, time: Tensor) -> Tensor:
    return as_operand(value, time.dtype, time.device) * torch.ones_like(time)
