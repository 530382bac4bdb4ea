"""What keys, shapes and probabilities must be, and what to write instead."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._errors import ArgumentError
from .._scalar import LiveFloat

Shape: TypeAlias = int | Sequence[int]


def check_key(key: Any) -> None:
    """Refuse what is no key."""
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.shape != (2,):
        raise ArgumentError(
            f"key is {_describe(key)}, but a key is an int64 tensor of shape (2,). "
            "Make one with yf.random.key(seed); map over many with torch.func.vmap."
        )


def as_shape(shape: Shape) -> tuple[int, ...]:
    """A shape as a tuple; a number is a vector's length."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(not isinstance(n, int) or n < 0 for n in sizes):
        raise ArgumentError(
            f"shape={shape!r} holds something other than lengths. Write a tuple of "
            "numbers of at least 0, such as shape=(8, 4)."
        )
    return sizes


def check_dtype(dtype: Any, allowed: Sequence[torch.dtype]) -> None:
    """Refuse a dtype that nothing can be drawn in."""
    if dtype not in allowed:
        names = ", ".join(str(d) for d in allowed)
        raise ArgumentError(f"dtype={dtype} is none of {names}. Convert the result.")


def check_probability(name: str, value: Any, below: float = 2.0) -> None:
    """Refuse a Python number outside [0, 1], or at or above `below`.

    A tensor or a live float may hold another value at every call and is not read.
    """
    if isinstance(value, Tensor | LiveFloat):
        return
    bound = "1)" if below <= 1 else "1]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"{name} is {_describe(value)}. Write {name}=0.1.")
    if not (0 <= value <= 1 and value < below):
        raise ArgumentError(
            f"{name}={value!r} is outside [0, {bound}. Write {name}=0.1."
        )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
