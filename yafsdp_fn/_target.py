"""Where what is loaded goes."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ._layout import Meta
from ._pieces import pieces_of
from ._shapes import dense_stride
from ._world import world_of


class Target:
    """New memory for what this process will hold of a leaf.

    Attributes:
        pieces: A tensor for each box that is to be read, by its offsets.
    """

    def __init__(self, path: str, like: torch.Tensor) -> None:
        self.like = like
        held = pieces_of(path, like)
        self.order = [(piece.offsets, piece.tensor.shape) for piece in held]
        device: Any = like.device
        if isinstance(like, DTensor):
            device = like.device_mesh.device_type
        elif like.is_meta:
            device = torch.get_default_device()
        self.pieces = {
            offsets: torch.empty_strided(
                shape,
                dense_stride(shape, like.stride()),
                dtype=like.dtype,
                device=device,
            )
            for offsets, shape in self.order
        }

    def overlaps(
        self, offsets: Sequence[int], shape: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, tuple[slice, ...]]]:
        """What a saved block has of the pieces: where it goes, and which part it is."""
        for begins, piece in self.pieces.items():
            here, there = [], []
            for begin, size, saved, length in zip(
                begins, piece.shape, offsets, shape, strict=True
            ):
                first, end = max(begin, saved), min(begin + size, saved + length)
                here.append(slice(first - begin, max(first, end) - begin))
                there.append(slice(first - saved, max(first, end) - saved))
            place = piece[tuple(here)]
            if place.numel():
                yield place, tuple(there)

    def leaf(self) -> torch.Tensor:
        """The leaf, placed as the one that it is like."""
        tensors = [self.pieces[offsets] for offsets, _ in self.order]
        if not isinstance(self.like, DTensor):
            return tensors[0]
        mesh = self.like.device_mesh
        world, meta = world_of(mesh), Meta.of(self.like)
        return world.leaf(world.together(tensors), mesh, meta, self.like.placements)
