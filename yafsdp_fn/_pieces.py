"""The pieces of a leaf that lie in this process, and which of them it writes."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ._errors import ArgumentError
from ._layout import Pending, interval
from ._mesh import axis_sizes, coordinates, from_torch, is_emulated, own_coordinate
from ._world import contributes, world_of

_BLOCK_BYTES = 1 << 24  # the least that is read of a saved leaf


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor.

    Attributes:
        offsets: The global index of its first element.
        tensor: Its elements.
        written: Whether this process saves it; else another one holds the same.
    """

    offsets: tuple[int, ...]
    tensor: torch.Tensor
    written: bool = True

    @property
    def index(self) -> tuple[slice, ...]:
        """Where it lies in the global tensor."""
        pairs = zip(self.offsets, self.tensor.shape, strict=True)
        return tuple(slice(begin, begin + length) for begin, length in pairs)

    def blocks(self) -> Iterator["Piece"]:
        """The piece as runs of rows, so that a part of it can be read alone."""
        return self._cut(0)

    def _cut(self, dim: int) -> Iterator["Piece"]:
        """Runs along a dimension; a row that is too large is cut along the next."""
        nbytes = self.tensor.nbytes
        if nbytes <= _BLOCK_BYTES or dim == self.tensor.dim():
            yield self
            return
        rows = max(1, _BLOCK_BYTES * self.tensor.shape[dim] // nbytes)
        begins = itertools.count(self.offsets[dim], rows)
        for begin, block in zip(begins, self.tensor.split(rows, dim), strict=False):
            offsets = (*self.offsets[:dim], begin, *self.offsets[dim + 1 :])
            yield from Piece(offsets, block, self.written)._cut(dim + 1)


def pieces_of(path: str, leaf: torch.Tensor) -> list[Piece]:
    """What this process holds of a leaf: all of a plain one, its shards of a DTensor.

    Raises:
        ArgumentError: The leaf is a sum that is not taken yet.
    """
    if not isinstance(leaf, DTensor):
        return [Piece((0,) * leaf.dim(), _plain(leaf.detach()), _is_first())]
    mesh, shape = leaf.device_mesh, tuple(leaf.shape)
    placements = from_torch(leaf.placements, shape, axis_sizes(mesh), path)
    if any(isinstance(placement, Pending) for placement in placements):
        raise ArgumentError(
            f"{path} is a partial sum, which no checkpoint can hold. Write "
            "leaf.redistribute(placements=[Shard(0)]) first."
        )
    world = world_of(mesh)
    shards = world.tensors(world.part(cast(DTensor, leaf.detach()), placements))
    here = coordinates(mesh) if is_emulated(mesh) else [own_coordinate(mesh)]
    found = []
    for at, shard in zip(here, shards, strict=True):
        offsets = (interval(n, d, placements, at)[0] for d, n in enumerate(shape))
        found.append(Piece(tuple(offsets), _plain(shard), contributes(placements, at)))
    return found


def written_pieces(path: str, leaf: torch.Tensor) -> list[Piece]:
    """What this process saves of a leaf."""
    pieces = pieces_of(path, leaf)
    return [piece for piece in pieces if piece.written and piece.tensor.numel()]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, unless its conjugate or negative is still to be taken."""
    return tensor.resolve_conj().resolve_neg()


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in their order, as bytes in memory of the CPU."""
    dense = tensor.detach().cpu().contiguous()
    # A dimension of one element may have any stride.
    flat: Any = dense.as_strided((dense.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())
