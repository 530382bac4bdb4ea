"""Bits and uniform numbers, and what is decided by comparing them."""

from typing import Any

import torch
from torch import Tensor

from .._errors import ArgumentError
from .._scalar import LiveFloat
from ._check import Shape, as_shape, check_dtype, check_key, check_probability
from ._philox import words

# The digits of a dtype's significand: as many random bits fit without rounding.
DIGITS = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


def bits(key: Tensor, shape: Shape = ()) -> Tensor:
    """Random 32-bit words.

    Args:
        key: int64 `[2]`.
        shape: Of the result.

    Returns:
        int64 of that shape, uniform in [0, 2**32).

    Raises:
        ArgumentError: `key` is no key, or `shape` no shape.

    Example:
        >>> import yafsdp_fn as yf
        >>> yf.random.bits(yf.random.key(0), (1, 2))
        tensor([[1713891541, 3781805453]])
    """
    check_key(key)
    return words(key, as_shape(shape))


def uniform(
    key: Tensor,
    shape: Shape = (),
    low: Any = 0.0,
    high: Any = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Random numbers, uniform in [low, high).

    Args:
        key: int64 `[2]`.
        shape: Of the result.
        low: The least value: a number, or a tensor that broadcasts to `shape`.
        high: The end of the range. It can be met where `low + (high - low) * x` is
            rounded, never for `low=0, high=1`.
        dtype: Floating. Every multiple of 2**-24 in [0, 1) is as likely in float32, of
            2**-53 in float64, 2**-11 in float16, 2**-8 in bfloat16.

    Returns:
        A tensor of that shape and dtype. Differentiable in `low` and `high`.

    Raises:
        ArgumentError: `key` is no key, `shape` no shape, or `dtype` not floating.

    Example:
        >>> import yafsdp_fn as yf
        >>> yf.random.uniform(yf.random.key(0), (2, 2))
        tensor([[0.3990, 0.8805],
                [0.9722, 0.3621]])
    """
    check_key(key)
    check_dtype(dtype, tuple(DIGITS))
    digits = DIGITS[dtype]
    unit = integers(key, as_shape(shape), digits).to(dtype) * 2.0**-digits
    if _is_plain(low) and _is_plain(high) and (low, high) == (0, 1):
        return unit
    return (low + (high - low) * unit).to(dtype)


def integers(key: Tensor, shape: tuple[int, ...], digits: int) -> Tensor:
    """Random int64 below `2**digits`, for at most 63 digits."""
    first = words(key, shape)
    if digits <= 32:
        return first >> (32 - digits)
    return (first << (digits - 32)) | (words(key, shape, lane=1) >> (64 - digits))


def bernoulli(key: Tensor, p: Any = 0.5, shape: Shape | None = None) -> Tensor:
    """Random Booleans, true with probability `p`.

    Args:
        key: int64 `[2]`.
        p: The probability, rounded down to a multiple of 2**-32: a number, or a tensor
            that broadcasts to `shape`.
        shape: Of the result; by default that of `p`.

    Returns:
        bool of that shape. At `p=0` none is true, at `p=1` every one is.

    Raises:
        ArgumentError: `key` is no key, `shape` no shape, or `p` a Python number outside
            [0, 1].

    Example:
        >>> import yafsdp_fn as yf
        >>> yf.random.bernoulli(yf.random.key(0), 0.5, (4,))
        tensor([ True, False,  True, False])
    """
    check_key(key)
    check_probability("p", p)
    if shape is None:
        shape = p.shape if isinstance(p, Tensor) else ()
    return words(key, as_shape(shape)) < _threshold(p, key.device)


def _threshold(p: Any, device: torch.device) -> int | Tensor:
    """How many of all words are below: the same for a live number and a plain one."""
    if _is_plain(p):
        return int(p * 2**32)
    # Multiplied in float64: a live float takes the dtype of what it meets.
    unit = torch.full((), 2.0**32, dtype=torch.float64, device=device)
    p = p.to(torch.float64) if isinstance(p, Tensor) else p
    return (unit * p).to(torch.int64)


def dropout(key: Tensor, x: Tensor, rate: Any) -> Tensor:
    """Zeros in place of a random share of a tensor's elements; the others grow.

    Srivastava et al., "Dropout" (JMLR 2014), scaled while training: what is kept is
    divided by `1 - rate`, so that the expected value stays. To switch it off pass rate
    0, which changes nothing at all.

    Args:
        key: int64 `[2]`; one for every call, see `split` and `fold_in`.
        x: Floating or complex, of any shape.
        rate: The share that is dropped: a Python number in [0, 1), or a number that
            may change from call to call: a live float, or a tensor of shape `()`.

    Returns:
        A tensor like `x`.

    Raises:
        ArgumentError: `key` is no key, `x` neither floating nor complex, or `rate` a
            Python number outside [0, 1).

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> yf.random.dropout(yf.random.key(0), torch.ones(2, 4), 0.5)
        tensor([[2., 0., 0., 0.],
                [0., 2., 0., 2.]])
    """
    check_key(key)
    check_probability("rate", rate, below=1.0)
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise ArgumentError(f"x is {x.dtype}. Convert it, such as x.float(), first.")
    if _is_plain(rate) and rate == 0:
        return x
    kept = bernoulli(key, 1 - rate, tuple(x.shape))
    return torch.where(kept, x * (1 / (1 - rate)), 0).to(x.dtype)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, Tensor | LiveFloat)
