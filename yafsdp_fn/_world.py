"""The two worlds a program runs in: this process as one rank, or all ranks in it.

A `Part` is what a world holds of a value: a tensor in a world of processes, a list with
one tensor for each rank in an emulated one.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from ._collectives import BACKENDS
from ._errors import MismatchError
from ._interpret import Emulator, Runner
from ._layout import WHOLE, Meta, Pending, Placements, interval
from ._mesh import (
    coordinates,
    from_torch,
    gathered,
    is_emulated,
    own_coordinate,
    part_of,
)
from ._program import Program
from ._torch import LocalTensor, local_part, make_dtensor, per_rank, storage_id

Part = Any  # torch.Tensor, or list[torch.Tensor] in an emulated world


class World(Protocol):
    """What the library asks of a world."""

    def part(self, leaf: torch.Tensor, placements: Placements) -> Part:
        """What the ranks hold of an argument's leaf."""
        ...

    def leaf(
        self, part: Part, mesh: DeviceMesh, meta: Meta, placed: Sequence[TorchPlacement]
    ) -> DTensor:
        """The parts as a DTensor."""
        ...

    def plain(self, part: Part) -> torch.Tensor:
        """A replicated value as a plain tensor."""
        ...

    def tensors(self, part: Part) -> list[torch.Tensor]:
        """The tensors of a part that live in this process."""
        ...

    def together(self, tensors: list[torch.Tensor]) -> Part:
        """The inverse of `tensors`."""
        ...

    def executor(self, program: Program) -> Any:
        """A program bound to this world."""
        ...

    def agree(self, text: str) -> None:
        """Raise on all ranks if they do not hold the same text."""
        ...


def world_of(mesh: DeviceMesh) -> World:
    """The world of a mesh."""
    return EmulatedWorld(mesh) if is_emulated(mesh) else ProcessWorld(mesh)


def receives(mesh: DeviceMesh) -> bool:
    """Whether a reduce-scatter needs memory for what all ranks send."""
    if is_emulated(mesh) or mesh.size() == 1:
        return True
    backends = {dist.get_backend(group) for group in mesh.get_all_groups()}
    return any(BACKENDS[name].receives for name in backends)


# --- processes ------------------------------------------------------------------------


class ProcessWorld:
    """This process is one rank of the mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.coordinate = own_coordinate(mesh)
        sizes = tuple(mesh.shape)
        self.groups = [
            mesh.get_group(a) if n > 1 else None for a, n in enumerate(sizes)
        ]

    def part(self, leaf: torch.Tensor, placements: Placements) -> torch.Tensor:
        if isinstance(leaf, DTensor):
            return local_part(leaf)
        return part_of(leaf, placements, self.coordinate)

    def leaf(
        self,
        part: torch.Tensor,
        mesh: DeviceMesh,
        meta: Meta,
        placed: Sequence[TorchPlacement],
    ) -> DTensor:
        return make_dtensor(part, mesh, placed, meta.shape, meta.stride)

    def plain(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def tensors(self, part: torch.Tensor) -> list[torch.Tensor]:
        return [part]

    def together(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        (part,) = tensors
        return part

    def executor(self, program: Program) -> Runner:
        return Runner(program, self.coordinate, self.groups)

    def agree(self, text: str) -> None:
        """Gather a digest over every axis; if two differ, the texts, and raise."""
        found = self._all(hash_of(text))
        if len(set(found)) > 1:
            raise MismatchError(_difference(self._all(text)))

    def _all(self, value: str) -> list[str]:
        """The value of every rank, in their order."""
        return gathered(value, self.groups)


def hash_of(text: str) -> str:
    """A digest of a text, the same in every process."""
    return hashlib.sha256(text.encode()).hexdigest()


def _difference(texts: Sequence[str]) -> str:
    """Which ranks differ from the first, and in which line."""
    first = texts[0].splitlines()
    for rank, text in enumerate(texts):
        lines = text.splitlines()
        if lines != first:
            pairs = zip(
                first + [""] * len(lines), lines + [""] * len(first), strict=False
            )
            mine, other = next((a, b) for a, b in pairs if a != b)
            return (
                "the ranks hold different programs. The first difference: rank 0 has\n"
                f"    {mine.strip() or '(nothing)'}\nrank {rank} has\n"
                f"    {other.strip() or '(nothing)'}\nCall the step on all ranks with "
                "arguments of the same structure, shapes, dtypes and static values."
            )
    return "the ranks hold different programs."


# --- all ranks here -------------------------------------------------------------------


class EmulatedTensor(DTensor):
    """A DTensor whose shards all live in this process."""

    def full_tensor(self, **_: Any) -> torch.Tensor:
        """The full value, without communication."""
        return assemble(self)


class EmulatedWorld:
    """All ranks of the mesh live in this process."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.coordinates = coordinates(mesh)

    def part(self, leaf: torch.Tensor, placements: Placements) -> list[torch.Tensor]:
        if isinstance(leaf, DTensor):
            local = local_part(leaf)
            assert isinstance(local, LocalTensor)
            shards = per_rank(local)
            return [shards[rank] for rank in range(len(self.coordinates))]
        return [part_of(leaf, placements, at) for at in self.coordinates]

    def leaf(
        self,
        part: list[torch.Tensor],
        mesh: DeviceMesh,
        meta: Meta,
        placed: Sequence[TorchPlacement],
    ) -> DTensor:
        local = LocalTensor(dict(enumerate(_apart(part))))
        return make_dtensor(
            local, mesh, placed, meta.shape, meta.stride, EmulatedTensor
        )

    def plain(self, part: list[torch.Tensor]) -> torch.Tensor:
        return part[0]

    def tensors(self, part: list[torch.Tensor]) -> list[torch.Tensor]:
        return part

    def together(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors

    def executor(self, program: Program) -> Emulator:
        return Emulator(program, self.coordinates)

    def agree(self, text: str) -> None:
        """One process holds one program."""


def _apart(part: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each rank's shard in memory of its own: an edit in place is one edit a rank."""
    seen: set[Any] = set()
    made = []
    for shard in part:
        made.append(shard.clone() if storage_id(shard) in seen else shard)
        seen.add(storage_id(shard))
    return made


def assemble(tensor: DTensor) -> torch.Tensor:
    """The full value of an emulated DTensor, written together from all shards."""
    world = EmulatedWorld(tensor.device_mesh)
    sizes = tuple(tensor.device_mesh.shape)
    placements = from_torch(tensor.placements, tensor.shape, sizes, "the tensor")
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    shards = world.part(tensor, placements)
    for coordinate, shard in zip(world.coordinates, shards, strict=True):
        if contributes(placements, coordinate):
            region = tuple(
                slice(*interval(length, dim, placements, coordinate))
                for dim, length in enumerate(tensor.shape)
            )
            if any(isinstance(p, Pending) for p in placements):
                whole[region] += shard
            else:
                whole[region] = shard
    return whole


def contributes(placements: Placements, coordinate: Sequence[int]) -> bool:
    """Of ranks that hold the same, only the first one is read."""
    return all(
        position == 0 or placement != WHOLE
        for placement, position in zip(placements, coordinate, strict=True)
    )
