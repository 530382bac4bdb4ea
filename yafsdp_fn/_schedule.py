"""The knobs of a schedule."""

from dataclasses import dataclass
from typing import Literal

import torch

from ._errors import ArgumentError


@dataclass(frozen=True)
class Schedule:
    """How a step is planned; the result is the same up to the order of sums.

    Attributes:
        reduce: "once": a sum of gradients stays pending until all are added, and is
            reduced once. "each": every gradient is reduced before it is added to
            another, so that no rank holds a full sum; more bytes move.
        reduce_dtype: The dtype in which gradients travel when they are reduced; sums
            are taken in float32 at least. `None`: the dtype that they have.

    Raises:
        ArgumentError: A value that is none of these.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> yf.Schedule(reduce="each", reduce_dtype=torch.bfloat16).reduce
        'each'
    """

    reduce: Literal["once", "each"] = "once"
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.reduce not in ("once", "each"):
            raise ArgumentError(
                f"Schedule(reduce={self.reduce!r}): write 'once' or 'each'."
            )
        dtype = self.reduce_dtype
        floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype is not None and not floating:
            raise ArgumentError(
                f"Schedule(reduce_dtype={dtype!r}): write a floating dtype, such as "
                "torch.bfloat16, or None."
            )
