"""The knobs of a schedule."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

import torch

from ._errors import ArgumentError

_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Schedule:
    """How a step is planned; the result is the same up to the order of sums.

    Attributes:
        gather_memory: Bytes of gathered parameters alive at once on a rank. `None`: the
            two largest groups, as YaFSDP has them (and what it takes beyond that to
            gather no group more than twice); `math.inf`: all are kept from forward to
            backward (ZeRO-2). In between, what is gathered again is the least possible.
        prefetch: How many groups ahead of their use gathers start, if there is room;
            0: a group is gathered when it is used.
        group_by: What is gathered together: from the path of a leaf, such as
            `params['layers'][0]['up']`, to a hashable key. `None`: all leaves of a
            layer, the others by their top-level key. Small leaves with one dimension
            are gathered once, all together, in any case.
        reduce: "once": a sum of gradients stays pending until all are added, and is
            reduced once. "each": every gradient is reduced before it is added to
            another, so that no rank holds a full sum; more bytes move.
        reduce_dtype: The dtype in which gradients travel when they are reduced; sums
            are taken in float32 at least. `None`: the dtype that they have.
        compile: `True`: operators between two collectives are compiled as one, by
            Inductor, which fuses those that work element by element; the collectives
            stay where they are. It needs a C++ compiler, on a GPU Triton. The first
            call takes long; layers of one form are compiled once. Results are equal up
            to rounding, and lie outside of the planned memory, as does what a compiled
            region needs inside. Or the name of another backend of `torch.compile`:
            "aot_eager" and "eager" compile nothing, which helps to find out where an
            error comes from.
        fast_products: Whether float32 matrix products go to oneDNN on processors where
            torch's own are slow; the precision is that of float32.

    Raises:
        ArgumentError: A value that is none of these.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> yf.Schedule(reduce="each", reduce_dtype=torch.bfloat16).reduce
        'each'
    """

    gather_memory: float | None = None
    prefetch: int = 1
    group_by: Callable[[str], Hashable] | None = None
    reduce: Literal["once", "each"] = "once"
    reduce_dtype: torch.dtype | None = None
    fast_products: bool = True
    compile: bool | str = False

    def __post_init__(self) -> None:
        self._check_gathers()
        self._check_compile()
        if self.reduce not in ("once", "each"):
            raise ArgumentError(
                f"Schedule(reduce={self.reduce!r}): write 'once' or 'each'."
            )
        if self.reduce_dtype not in (None, *_SUMMED):
            raise ArgumentError(
                f"Schedule(reduce_dtype={self.reduce_dtype!r}): write torch.bfloat16, "
                "another floating dtype of at least 16 bits, or None."
            )

    def _check_gathers(self) -> None:
        memory, ahead, group_by = self.gather_memory, self.prefetch, self.group_by
        number = isinstance(memory, int | float) and not isinstance(memory, bool)
        if memory is not None and not (number and memory > 0):
            raise ArgumentError(
                f"Schedule(gather_memory={memory!r}): write bytes, such as 2 * 2**30, "
                "math.inf to keep all that is gathered, or None for two groups."
            )
        if type(ahead) is not int or ahead < 0:
            raise ArgumentError(
                f"Schedule(prefetch={ahead!r}): write how many groups ahead to gather, "
                "an int >= 0."
            )
        if group_by is not None and not callable(group_by):
            raise ArgumentError(
                f"Schedule(group_by={group_by!r}): write a function from the path of a "
                "leaf to a key, such as lambda path: path, or None."
            )

    def _check_compile(self) -> None:
        if isinstance(self.compile, bool):
            return
        named = isinstance(self.compile, str)
        if not named or self.compile not in torch.compiler.list_backends(()):
            raise ArgumentError(
                f"Schedule(compile={self.compile!r}): write True for Inductor, False, "
                "or the name of a backend of torch.compile, such as 'aot_eager'."
            )
