"""Random orders."""

import torch
from torch import Tensor

from .._errors import ArgumentError
from ._check import check_key
from ._draws import integers


def permutation(key: Tensor, x: int | Tensor) -> Tensor:
    """Numbers, or the rows of a tensor, in a random order.

    Args:
        key: int64 `[2]`.
        x: A length n, for the numbers 0 to n - 1; or a tensor `[n, ...]`, for its rows.

    Returns:
        int64 `[n]`, or a tensor like `x`. Every order is as likely, but for random
        numbers of 63 bits that are equal: once in 2**64 / n**2 calls.

    Raises:
        ArgumentError: `key` is no key, `x` negative or a tensor without dimensions.

    Example:
        >>> import yafsdp_fn as yf
        >>> yf.random.permutation(yf.random.key(0), 5)
        tensor([2, 0, 3, 4, 1])
    """
    check_key(key)
    length = _length(x)
    # A stable sort: equal numbers keep their order on every device.
    order = torch.argsort(integers(key, (length,), 63), stable=True)
    return x.index_select(0, order) if isinstance(x, Tensor) else order


def _length(x: int | Tensor) -> int:
    if isinstance(x, Tensor) and x.dim() > 0:
        return x.shape[0]
    if isinstance(x, int) and x >= 0:
        return x
    raise ArgumentError(
        "x must be a length of at least 0, or a tensor with rows. Write "
        "permutation(key, 10), or permutation(key, x.reshape(-1))."
    )
