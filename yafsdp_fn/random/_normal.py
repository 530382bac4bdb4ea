"""Normal numbers and choices: functions of uniform numbers, exact on every device.

Only sums, products, quotients and roots are used, which IEEE 754 rounds alike
everywhere; a logarithm of torch may differ in its last bit from device to device, and
from the middle of a tensor to its end, so that a part would differ from the whole.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._check import Shape, as_shape, check_dtype, check_key
from ._draws import DIGITS, integers


def normal(
    key: Tensor, shape: Shape = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Random numbers from the standard normal distribution.

    Args:
        key: int64 `[2]`.
        shape: Of the result.
        dtype: Floating; float16 and bfloat16 are drawn in float32 and rounded.

    Returns:
        A tensor of that shape and dtype, of mean 0 and variance 1. In float32 no value
        is beyond 5.3, in float64 none beyond 8.2.

    Raises:
        ArgumentError: `key` is no key, `shape` no shape, or `dtype` not floating.

    Example:
        >>> import yafsdp_fn as yf
        >>> yf.random.normal(yf.random.key(0), (2, 2))
        tensor([[-0.2558,  1.1776],
                [ 1.9148, -0.3529]])
    """
    check_key(key)
    check_dtype(dtype, tuple(DIGITS))
    if dtype == torch.float64:
        return _quantile_double(_open_unit(key, as_shape(shape), dtype))
    return _quantile_single(_open_unit(key, as_shape(shape), torch.float32)).to(dtype)


def categorical(key: Tensor, logits: Tensor, dim: int = -1) -> Tensor:
    """Random classes, each with the probability that softmax gives it.

    The Gumbel-max trick (Gumbel, 1954): the largest logit after adding noise.

    Args:
        key: int64 `[2]`.
        logits: Floating, unnormalised logarithms of probabilities; `-inf` for never.
        dim: The dimension of the classes.

    Returns:
        int64 of the shape of `logits` without `dim`.

    Raises:
        ArgumentError: `key` is no key, or `logits` not floating.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> yf.random.categorical(yf.random.key(0), torch.zeros(4, 3))
        tensor([1, 0, 1, 0])
    """
    check_key(key)
    check_dtype(logits.dtype, tuple(DIGITS))
    drawn = torch.promote_types(logits.dtype, torch.float32)
    unit = _open_unit(key, tuple(logits.shape), drawn)
    return (logits - _log(-_log(unit))).argmax(dim)


def _open_unit(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uniform in (0, 1), alike around 1/2, and neither end is met."""
    digits = DIGITS[dtype] - 1
    return (integers(key, shape, digits).to(dtype) + 0.5) * 2.0**-digits


# --- functions ------------------------------------------------------------------------


def _log(x: Tensor) -> Tensor:
    """The natural logarithm of positive numbers, to an ulp or two.

    With x = m * 2**e and m near 1, log m = 2 artanh s for s = (m - 1) / (m + 1).
    """
    mantissa, exponent = torch.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, 2 * mantissa, mantissa)
    exponent = exponent.to(x.dtype) - low.to(x.dtype)
    s = (mantissa - 1) / (mantissa + 1)
    terms = 10 if x.dtype == torch.float64 else 4
    series = _polynomial(s * s, [2 / (2 * n + 1) for n in range(terms, -1, -1)])
    return exponent * math.log(2) + s * series


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """By Horner's rule, the highest power first."""
    first, second, *others = coefficients
    value = first * x + second
    for coefficient in others:
        value = value * x + coefficient
    return value


def _quantile_single(u: Tensor) -> Tensor:
    """The normal quantile to 7 digits: sqrt(2) erfinv(2 u - 1).

    Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011).
    """
    w = -_log(4 * u * (1 - u))
    centre = _polynomial(w - 2.5, _CENTRE)
    tail = _polynomial(w.sqrt() - 3, _TAIL)
    return torch.where(w < 5, centre, tail) * (2 * u - 1) * math.sqrt(2)


def _quantile_double(u: Tensor) -> Tensor:
    """The normal quantile to 16 digits.

    Wichura, "Algorithm AS 241: the percentage points of the normal distribution"
    (Applied Statistics, 1988).
    """
    q = u - 0.5
    r = (-_log(torch.minimum(u, 1 - u))).sqrt()
    near, far = _ratio(r - 1.6, _NEAR), _ratio(r - 5, _FAR)
    tail = torch.where(r <= 5, near, far) * q.sign()
    return torch.where(q.abs() <= 0.425, q * _ratio(0.180625 - q * q, _MIDDLE), tail)


def _ratio(x: Tensor, coefficients: Sequence[Sequence[float]]) -> Tensor:
    above, below = coefficients
    return _polynomial(x, above) / _polynomial(x, below)


# The published coefficients, highest power first.
_CENTRE = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)
_MIDDLE = (
    (
        2509.0809287301227,
        33430.57558358813,
        67265.7709270087,
        45921.95393154987,
        13731.69376550946,
        1971.5909503065513,
        133.14166789178438,
        3.3871328727963665,
    ),
    (
        5226.495278852854,
        28729.085735721943,
        39307.89580009271,
        21213.794301586597,
        5394.196021424751,
        687.1870074920579,
        42.31333070160091,
        1.0,
    ),
)
_NEAR = (
    (
        0.0007745450142783414,
        0.022723844989269184,
        0.2417807251774506,
        1.2704582524523684,
        3.6478483247632045,
        5.769497221460691,
        4.630337846156546,
        1.4234371107496835,
    ),
    (
        1.0507500716444169e-09,
        0.0005475938084995345,
        0.015198666563616457,
        0.14810397642748008,
        0.6897673349851,
        1.6763848301838038,
        2.053191626637759,
        1.0,
    ),
)
_FAR = (
    (
        2.0103343992922881e-07,
        2.7115555687434876e-05,
        0.0012426609473880784,
        0.026532189526576124,
        0.29656057182850487,
        1.7848265399172913,
        5.463784911164114,
        6.657904643501103,
    ),
    (
        2.0442631033899397e-15,
        1.421511758316446e-07,
        1.8463183175100548e-05,
        0.0007868691311456133,
        0.014875361290850615,
        0.1369298809227358,
        0.599832206555888,
        1.0,
    ),
)
