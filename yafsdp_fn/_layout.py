"""Where the elements of a value live: one placement for every mesh axis.

`Split` is DTensor's `Shard` with the length of a rank's part written out. That makes
three things exact which `Shard` cannot say: ten rows on four ranks are 3, 3, 3, 1; the
same rows flattened with a dimension of seven are 21, 21, 21, 7; and both are one and
the same distribution of elements.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

# --- one axis -------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """Every rank of the axis holds the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Split:
    """Rank r of the axis holds elements `[r * chunk, (r + 1) * chunk)` of `dim`."""

    dim: int
    chunk: int

    def __str__(self) -> str:
        return f"S({self.dim}:{self.chunk})"


@dataclass(frozen=True)
class Pending:
    """The value is the `op` ("sum", "max", "min") of what the axis' ranks hold."""

    op: str = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


Placement = Whole | Split | Pending
Placements = tuple[Placement, ...]
WHOLE = Whole()
SUM = Pending("sum")


def even_chunk(size: int, ranks: int) -> int:
    """The length of a rank's part of `size` elements, as `torch.chunk` cuts them."""
    return max(1, -(-size // ranks))


# --- a value --------------------------------------------------------------------------


@dataclass(frozen=True)
class Meta:
    """Shape, dtype, stride and device of a value as the unsharded step sees it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Meta":
        """The description of a tensor; a DTensor's is that of the global value."""
        return cls(
            tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()), tensor.device
        )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        sizes = ",".join(map(str, self.shape))
        return f"{short_dtype(self.dtype)}[{sizes}]"


def short_dtype(dtype: torch.dtype) -> str:
    """`float32` → `f32`, `bfloat16` → `bf16`, `int64` → `i64`."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def interval(
    size: int, dim: int, placements: Sequence[Placement], coordinate: Sequence[int]
) -> tuple[int, int]:
    """First and last-plus-one element of `dim` that the rank at `coordinate` holds.

    Axes split one dimension from the first to the last: the second axis cuts what the
    first one left.

    >>> interval(10, 0, (Split(0, 5), Split(0, 3)), (1, 1))
    (8, 10)
    """
    start, stop = 0, size
    for placement, position in zip(placements, coordinate, strict=True):
        if isinstance(placement, Split) and placement.dim == dim:
            start = min(stop, start + position * placement.chunk)
            stop = min(stop, start + placement.chunk)
    return start, stop


def local_shape(
    shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """The shape of the part that the rank at `coordinate` of the mesh holds.

    >>> local_shape((10, 4), (Split(0, 3),), (3,))
    (1, 4)
    """
    bounds = (interval(n, d, placements, coordinate) for d, n in enumerate(shape))
    return tuple(stop - start for start, stop in bounds)


def covers(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int]
) -> bool:
    """Whether the parts of all ranks together are the whole value.

    >>> covers((6,), (Split(0, 3), Split(0, 2)), (2, 2))
    True
    >>> covers((6,), (WHOLE, Split(0, 2)), (2, 2))
    False
    """
    lengths = list(shape)
    for placement, ranks in zip(placements, sizes, strict=True):
        if isinstance(placement, Split):
            if placement.chunk * ranks < lengths[placement.dim]:
                return False
            lengths[placement.dim] = placement.chunk
    return True


def replace(placements: Placements, axis: int, placement: Placement) -> Placements:
    """`placements` with another placement on one axis."""
    return (*placements[:axis], placement, *placements[axis + 1 :])
