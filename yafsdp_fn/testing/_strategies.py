"""Strategies for shapes, tensors, trees and meshes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch.distributed.device_mesh import DeviceMesh

from .._mesh import make_mesh
from .._tree import NAMESPACE
from ._hypothesis import strategies as st

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
LAYOUTS = ("plain", "transposed", "channels_last")


def shapes(most_dims: int = 4, longest: int = 7) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes, those without dimensions and without elements among them.

    Args:
        most_dims: The largest number of dimensions.
        longest: The largest length of a dimension.

    Example:
        >>> from hypothesis import given
        >>> import yafsdp_fn as yf
        >>> @given(shape=yf.testing.shapes(most_dims=2))
        ... def test(shape):
        ...     assert torch.empty(shape).dim() <= 2
        >>> test()
    """
    return st.lists(st.integers(0, longest), max_size=most_dims).map(tuple)


def tensors(
    shape: st.SearchStrategy[tuple[int, ...]] | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    *,
    special: bool = True,
) -> st.SearchStrategy[torch.Tensor]:
    """Tensors of many dtypes, in one of several orders in memory.

    Args:
        shape: Their shapes; by default `shapes()`.
        dtypes: Their dtypes; by default floats, integers, truth values and complex
            numbers.
        special: Begin floats with -0.0, NaN and negative infinity.

    Example:
        >>> from hypothesis import given
        >>> import yafsdp_fn as yf
        >>> @given(x=yf.testing.tensors(dtypes=[torch.float32], special=False))
        ... def test(x):
        ...     assert x.isfinite().all()
        >>> test()
    """
    return st.builds(
        tensor,
        shapes() if shape is None else shape,
        st.sampled_from(dtypes),
        st.sampled_from(LAYOUTS),
        st.integers(0, 99),
        st.just(special),
    )


def tensor(
    shape: Sequence[int],
    dtype: torch.dtype,
    layout: str = "plain",
    seed: int = 0,
    special: bool = True,
) -> torch.Tensor:
    """Normal numbers of a seed, in one of `LAYOUTS` where their shape allows it."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(tuple(shape), dtype=torch.float64, generator=generator) * 3
    if special and dtype.is_floating_point:
        first = torch.tensor([-0.0, float("nan"), float("-inf")], dtype=torch.float64)
        value.view(-1)[: len(first)] = first[: value.numel()]
    value = value.to(dtype)
    if layout == "transposed" and value.dim() > 1:
        return value.mT.contiguous().mT
    if layout == "channels_last" and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


_not_a_child: Any = optree.dataclasses.field


class Pair(NamedTuple):
    """A node of drawn trees."""

    left: Any
    right: Any


@optree.dataclasses.dataclass(namespace=NAMESPACE)  # type: ignore[call-overload]
class Layer:
    """A registered class as a node of drawn trees, with a field that is no child."""

    weight: Any
    bias: Any
    name: str = _not_a_child(default="layer", pytree_node=False)


def trees(
    leaves: st.SearchStrategy[Any] | None = None, most_leaves: int = 8
) -> st.SearchStrategy[Any]:
    """Lists, tuples, dicts, named tuples and registered classes, nested at will.

    Args:
        leaves: By default `tensors()`, numbers, a string, and `None`.
        most_leaves: The largest number of leaves.

    Example:
        >>> from hypothesis import given
        >>> import yafsdp_fn as yf
        >>> @given(tree=yf.testing.trees(), mesh=yf.testing.meshes())
        ... def test(tree, mesh):
        ...     back = yf.full(yf.distribute(tree, mesh))
        ...     specs = (optree.tree_structure(t, namespace="yafsdp_fn")
        ...              for t in (back, tree))
        ...     assert next(specs) == next(specs)
        >>> test()
    """
    if leaves is None:
        leaves = tensors() | st.none() | st.sampled_from([3, 0.5, "name"])
    return st.recursive(leaves, _nodes, max_leaves=most_leaves)


def _nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Layer, inner, inner)
    )


def meshes(most_ranks: int = 4) -> st.SearchStrategy[DeviceMesh]:
    """Emulated meshes: `fsdp` alone, and `replicate` × `fsdp`.

    Args:
        most_ranks: The largest number of ranks of a mesh.

    Example:
        >>> from hypothesis import given
        >>> import yafsdp_fn as yf
        >>> @given(mesh=yf.testing.meshes(most_ranks=6))
        ... def test(mesh):
        ...     assert mesh.size() <= 6 and mesh.ndim <= 2
        >>> test()
    """
    counts = range(1, most_ranks + 1)
    alone = [(n,) for n in counts]
    both = [(m, n) for m in counts for n in counts if m * n <= most_ranks]
    return st.sampled_from([*alone, *both]).map(_emulated)


def _emulated(sizes: tuple[int, ...]) -> DeviceMesh:
    if len(sizes) == 1:
        return make_mesh(emulate=True, fsdp=sizes[0])
    return make_mesh(emulate=True, replicate=sizes[0], fsdp=sizes[1])
