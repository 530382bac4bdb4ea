"""Hyper-parameters: checked when they are plain numbers, never read when they live.

A live number (a 0-dim tensor, or what `shard` passes in place of a Python float) may
differ at every call of one traced program. It meets tensors in arithmetic only.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeGuard

import torch
from torch import Tensor

from .._errors import ArgumentError
from .._scalar import LiveFloat


class LiveNumber(Protocol):
    """What multiplies a tensor, and tells nothing else about itself."""

    def __mul__(self, other: Tensor, /) -> Tensor: ...


Number: TypeAlias = float | Tensor | LiveNumber
LearningRate: TypeAlias = Number | Callable[[Tensor], Number]


def is_plain(value: Any) -> TypeGuard[float]:
    """Whether a value is a Python number; a live float only says that it is one."""
    return isinstance(value, int | float) and not isinstance(value, LiveFloat)


def check_plain(name: str, value: Any, low: float, high: float, instead: str) -> None:
    """Refuse what is no Python number in [low, high)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        found = type(value).__name__
        raise ArgumentError(
            f"{name} is a {found}, but must be a Python number. Write {instead}."
        )
    if not low <= value < high:
        raise ArgumentError(
            f"{name}={value!r} is outside [{low:g}, {high:g}). Write {instead}."
        )


def check_number(name: str, value: Any, low: float, high: float, instead: str) -> None:
    """Refuse a plain number outside [low, high), and what cannot be a live number."""
    if is_plain(value):
        check_plain(name, value, low, high, instead)
    elif isinstance(value, Tensor) and value.dim() > 0:
        raise ArgumentError(
            f"{name} is a tensor of shape {tuple(value.shape)}, but one number is"
            f" needed. Write {instead}, or a tensor of shape ()."
        )
    elif isinstance(value, str | list | tuple) or not hasattr(value, "__mul__"):
        found = type(value).__name__
        raise ArgumentError(f"{name} is a {found}, not a number. Write {instead}.")


def check_rate(rate: Any) -> None:
    """Refuse what is neither a learning rate nor a schedule of one."""
    if not callable(rate):
        instead = "learning_rate=3e-4, or a schedule of the step count"
        check_number("learning_rate", rate, 0, math.inf, instead)


def rate_at(rate: LearningRate, count: Tensor) -> Number:
    """The learning rate of the update that `count` others went before."""
    return rate(count) if callable(rate) else rate


def as_operand(
    value: Number, dtype: torch.dtype, device: torch.device
) -> float | Tensor:
    """A Python number as it is; a live one as a 0-dim tensor that promotes nothing."""
    if is_plain(value):
        return value
    return (value * torch.ones((), dtype=dtype, device=device)).to(dtype)
