"""Two trees compared: the first leaf that differs, and where, and by how much."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch

from .._tree import flatten, flatten_with_paths

# Of the largest value of a leaf: what sums in another order, and roundings to the dtype
# in other places, make of a few layers.
_RTOL = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}


@dataclass(frozen=True)
class Difference:
    """Where two trees differ first.

    Attributes:
        leaf: The number of the leaf, or None if the structures differ.
        path: The expression that reaches it.
        text: What was found there, and what was wanted.
    """

    leaf: int | None
    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path} {self.text}"


@dataclass(frozen=True)
class Tolerance:
    """How far the elements of a floating leaf may differ.

    Attributes:
        rtol: A part of the leaf's largest finite magnitude; by default the dtype's.
        atol: Added to it, in the leaf's own unit; by default nothing.
    """

    rtol: float | None = None
    atol: float | None = None

    def of(self, want: torch.Tensor) -> float:
        """The largest difference that a leaf is allowed."""
        if not _is_inexact(want.dtype):
            return 0.0
        real = want.dtype.to_real()
        rtol = self.rtol
        if rtol is None:
            rtol = _RTOL.get(real, 2 * torch.finfo(real).eps)
        return rtol * _largest(want) + (self.atol or 0.0)


EXACT = Tolerance(0.0, 0.0)


def first_difference(
    found: Any,
    wanted: Any,
    tolerance: Tolerance,
    strided: Container[int] | None = None,
) -> Difference | None:
    """Compare two trees of plain tensors: structure, dtypes, shapes, strides, values.

    Integers, truth values and what is no number agree exactly; floats within the
    tolerance; NaN with NaN.

    Args:
        found: The tree to judge.
        wanted: What it should be.
        tolerance: For its floating leaves.
        strided: Numbers of the leaves whose strides have to agree; `None`: of all.

    Returns:
        The first difference, or None.

    Example:
        >>> found, wanted = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.ones(2)}
        >>> print(first_difference(found, wanted, Tolerance()))
        output['w'] at [1] is 2.0, should be 1.0 (1 of 2 elements; by up to 1, allowed \
is 1e-05: rtol= and atol= set it)
    """
    haves, spec = flatten(found)
    paths, wants, wanted_spec = flatten_with_paths(wanted, "output")
    if spec != wanted_spec:
        return Difference(None, "output", f"is a {spec}, should be a {wanted_spec}")
    for leaf, (path, have, want) in enumerate(zip(paths, haves, wants, strict=True)):
        with_strides = strided is None or leaf in strided
        text = _of_leaves(have, want, tolerance, with_strides)
        if text is not None:
            return Difference(leaf, path, text)
    return None


def _of_leaves(
    have: Any, want: Any, tolerance: Tolerance, with_strides: bool
) -> str | None:
    if isinstance(have, torch.Tensor) and isinstance(want, torch.Tensor):
        kind = _of_kinds(have, want, with_strides)
        return kind or _of_values(have, want, tolerance)
    if type(have) is float and type(want) is float:
        return _of_values(_as_tensor(have), _as_tensor(want), tolerance)
    if type(have) is type(want) and have == want:
        return None
    return f"is {_shown(have)}, should be {_shown(want)}"


def _as_tensor(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _shown(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of shape {tuple(leaf.shape)}"
    return f"the {type(leaf).__name__} {leaf!r}"


def _of_kinds(have: torch.Tensor, want: torch.Tensor, with_strides: bool) -> str | None:
    if have.shape != want.shape:
        return f"has the shape {tuple(have.shape)}, should have {tuple(want.shape)}"
    if have.dtype != want.dtype:
        return f"is of {have.dtype}, should be of {want.dtype}"
    means_something = want.numel() and 0 not in want.stride()  # an expansion's do not
    if with_strides and means_something and _strides(have) != _strides(want):
        return f"has the strides {have.stride()}, should have {want.stride()}"
    return None


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions in which they mean something."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for length, stride in pairs if length > 1]


def _of_values(
    have: torch.Tensor, want: torch.Tensor, tolerance: Tolerance
) -> str | None:
    allowed = tolerance.of(want)
    wide = _wide(want.dtype)
    a, b = have.detach().to(wide), want.detach().to(wide)
    near = (a == b) | ((a - b).abs() <= allowed) | (a.isnan() & b.isnan())
    if near.all():
        return None
    index = tuple((~near).nonzero()[0].tolist())
    at = f"at {list(index)} " if index else ""
    text = f"{at}is {have[index].item()}, should be {want[index].item()}"
    text += f" ({(~near).sum()} of {near.numel()} elements"
    if _is_inexact(want.dtype):
        most = (a - b)[~near].abs().max().item()
        text += f"; by up to {most:.3g}, allowed is {allowed:.3g}: rtol= and atol= "
        text += "set it"
    return f"{text})"


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which two values of a dtype can be subtracted."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _largest(tensor: torch.Tensor) -> float:
    """The largest magnitude that is finite."""
    sizes = tensor.detach().to(_wide(tensor.dtype)).abs()
    finite = sizes[sizes.isfinite()]
    return finite.max().item() if finite.numel() else 0.0
