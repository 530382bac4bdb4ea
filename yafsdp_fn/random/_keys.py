"""Keys: made from a seed, and new ones from old ones."""

import torch
from torch import Tensor

from .._errors import ArgumentError
from ._check import check_key
from ._philox import FOLD, MASK, SPLIT, philox, two_words


def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """A key from a seed.

    A key is a plain tensor: an argument of a step, or a leaf of its state. It is never
    used up, and whatever is drawn from it is a function of it: draw once from each key,
    and `split` it or `fold_in` a step count for more.

    Args:
        seed: A number in [-2**63, 2**64), as `torch.manual_seed` takes; a negative one
            stands for `seed + 2**64`.
        device: Where the key lies, and what is drawn from it.

    Returns:
        int64 `[2]`: the low and the high 32 bits of the seed.

    Raises:
        ArgumentError: The seed is no such number.

    Example:
        >>> import yafsdp_fn as yf
        >>> yf.random.key(7)
        tensor([7, 0])
        >>> yf.random.key(-1)
        tensor([4294967295, 4294967295])
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError(
            f"seed is a {type(seed).__name__}, but must be a Python int. Write "
            "key(7), or fold_in(key(0), n) for a tensor n."
        )
    _check_range("seed", seed, 2**64)
    return torch.tensor([seed & MASK, (seed >> 32) & MASK], device=device)


def split(key: Tensor, num: int = 2) -> Tensor:
    """New keys from one, independent of it and of each other.

    Args:
        key: int64 `[2]`.
        num: How many.

    Returns:
        int64 `[num, 2]`, a key in each row. The first rows do not depend on `num`.

    Raises:
        ArgumentError: `key` is no key, or `num` is negative or no int.

    Example:
        >>> import yafsdp_fn as yf
        >>> first, second = yf.random.split(yf.random.key(0))
        >>> first
        tensor([768504805, 323543615])
    """
    check_key(key)
    if not isinstance(num, int) or num < 0:
        raise ArgumentError(f"num={num!r} is no number of keys. Write num=2.")
    numbers = torch.arange(num, device=key.device)
    low, high, *_ = philox((*two_words(numbers, (num,)), 0, SPLIT), key)
    return torch.stack([low, high], dim=-1)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and a number: of a step, a layer, a rank's own data.

    Args:
        key: int64 `[2]`.
        data: A number in [-2**63, 2**63), or an integer tensor of shape `()`, such as
            a step count that changes from call to call.

    Returns:
        int64 `[2]`, independent of `key`, of its splits, and of those of other numbers.

    Raises:
        ArgumentError: `key` is no key, or `data` no integer.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> yf.random.fold_in(yf.random.key(0), torch.tensor(3))
        tensor([ 503844516, 1535649829])
    """
    check_key(key)
    number = _as_number(data, key.device)
    low, high, *_ = philox((number, number >> 32, 0, FOLD), key)
    return torch.stack([low, high])


def _as_number(data: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(data, int):
        _check_range("data", data, 2**63)
        return torch.full((), data, dtype=torch.int64, device=device)
    if isinstance(data, Tensor) and data.dim() == 0 and _is_integer(data.dtype):
        return data.to(torch.int64)
    raise ArgumentError(
        "data must be a Python int or an integer tensor of shape (). For many numbers "
        "write torch.func.vmap(yf.random.fold_in, (None, 0))(key, numbers)."
    )


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _check_range(name: str, number: int, end: int) -> None:
    if not -(2**63) <= number < end:
        raise ArgumentError(
            f"{name}={number} is outside [-2**63, 2**{end.bit_length() - 1}). Take "
            f"{name} % 2**63, or fold_in its parts one after the other."
        )
