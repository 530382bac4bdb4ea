"""Full tensors to DTensors and back."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from ._donate import refuse_donated
from ._errors import ArgumentError
from ._layout import Meta
from ._mesh import (
    axis_names,
    axis_sizes,
    batch_axes,
    coordinates,
    from_torch,
    gathered,
    is_emulated,
    part_of,
    split_on,
    state_axis,
    to_torch,
)
from ._tree import flatten, flatten_with_paths, map_with_paths, unflatten
from ._world import World, assemble, world_of

TorchPlacements = Sequence[TorchPlacement]
Choose = Callable[[str, torch.Tensor], TorchPlacements | None]


def distribute(
    tree: Any, mesh: DeviceMesh, placements: TorchPlacements | Choose | None = None
) -> Any:
    """Give every rank its part of a tree of full tensors.

    By default a floating leaf with a dimension is sharded on dimension 0 over the axis
    `fsdp`, `torch.chunk`'s way (ten rows on four ranks: 3, 3, 3, 1); any other leaf is
    replicated. No communication takes place: every rank must pass the same values.

    Args:
        tree: A pytree of full tensors; other leaves are passed through.
        mesh: Where to put it.
        placements: One placement for each mesh axis, for all leaves; or a function of a
            leaf's path and the leaf that returns them, `None` for the default.

    Returns:
        The same tree with DTensor leaves of the same global shape, dtype and stride.

    Raises:
        ArgumentError: Placements that do not fit the mesh or a leaf.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> mesh = yf.make_mesh(fsdp=4, emulate=True)
        >>> params = yf.distribute({"w": torch.ones(10, 3)}, mesh)
        >>> params["w"].shape, params["w"].placements
        (torch.Size([10, 3]), (Shard(dim=0),))
    """
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"mesh is a {type(mesh).__name__}. Write yf.distribute(tree, mesh) with a "
            "mesh of yf.make_mesh(fsdp=...)."
        )
    world = world_of(mesh)

    def place(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if isinstance(leaf, DTensor):
            raise ArgumentError(
                f"{path} is a DTensor already. To move it to another mesh or placement "
                "write yf.distribute(yf.full(tree), mesh)."
            )
        given = placements(path, leaf) if callable(placements) else placements
        return _distribute_leaf(world, mesh, path, leaf, given)

    return map_with_paths(place, tree, "tree")


def default_placements(leaf: torch.Tensor, mesh: DeviceMesh) -> TorchPlacements:
    """Where a plain leaf of state lies: `Shard(0)` on the state axis, or replicated."""
    placed: list[TorchPlacement] = [Replicate()] * mesh.ndim
    if leaf.dim() > 0 and leaf.dtype.is_floating_point:
        placed[state_axis(mesh)] = Shard(0)
    return tuple(placed)


def batch_placements(leaf: torch.Tensor, mesh: DeviceMesh) -> TorchPlacements:
    """Where a plain leaf of the batch lies: dimension 0 over all batch axes."""
    axes = batch_axes(mesh)
    return tuple(Shard(0) if a in axes else Replicate() for a in range(mesh.ndim))


def _distribute_leaf(
    world: World,
    mesh: DeviceMesh,
    path: str,
    leaf: torch.Tensor,
    given: TorchPlacements | None,
) -> DTensor:
    placed = tuple(given or default_placements(leaf, mesh))
    _check_placements(path, leaf, placed, mesh)
    placed = tuple(
        Shard(p.dim % leaf.dim()) if isinstance(p, Shard) else p for p in placed
    )
    ours = from_torch(placed, leaf.shape, axis_sizes(mesh), path)
    part = world.part(leaf.detach(), ours)
    cloned = [shard.clone() for shard in world.tensors(part)]
    owned = cloned if is_emulated(mesh) else cloned[0]
    stride = torch.empty_like(leaf, device="meta").stride()
    meta = Meta(tuple(leaf.shape), leaf.dtype, tuple(stride), leaf.device)
    return world.leaf(owned, mesh, meta, placed)


def _check_placements(
    path: str, leaf: torch.Tensor, placed: TorchPlacements, mesh: DeviceMesh
) -> None:
    if len(placed) != mesh.ndim:
        raise ArgumentError(
            f"{path}: {len(placed)} placements for a mesh with the axes "
            f"{axis_names(mesh)}. Give one for each axis."
        )
    for placement in placed:
        dims = range(-leaf.dim(), leaf.dim())
        if isinstance(placement, Shard) and placement.dim not in dims:
            raise ArgumentError(
                f"{path} of shape {tuple(leaf.shape)} has no dimension {placement.dim} "
                "to shard. Use Replicate() for it."
            )
        if placement.is_partial():
            raise ArgumentError(
                f"{path}: a full tensor cannot be distributed as {placement}. Use "
                "Shard or Replicate."
            )


# --- back -----------------------------------------------------------------------------


def full(tree: Any) -> Any:
    """Put the full value in place of every DTensor leaf, on every rank.

    Args:
        tree: A pytree; leaves that are no DTensors are passed through.

    Returns:
        The same tree with plain tensors of the same shape, dtype and stride.

    Raises:
        DonatedError: A leaf's memory was donated to an earlier call.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> mesh = yf.make_mesh(fsdp=4, emulate=True)
        >>> yf.full(yf.distribute({"b": torch.arange(3.0)}, mesh))
        {'b': tensor([0., 1., 2.])}
    """
    return map_with_paths(_full_leaf, tree, "tree")


def _full_leaf(path: str, leaf: Any) -> Any:
    refuse_donated(path, leaf)
    if not isinstance(leaf, DTensor):
        return leaf
    if is_emulated(leaf.device_mesh):
        whole = assemble(leaf)
    else:
        whole = cast(DTensor, leaf.detach()).full_tensor()
    return with_stride(whole, leaf.stride())


def with_stride(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The tensor itself if it lies in memory this way, else a copy that does."""
    wanted = tuple(stride)
    if tensor.stride() == wanted or tensor.numel() <= 1 or 0 in wanted:
        return tensor
    return torch.empty_strided(
        tensor.shape, wanted, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


# --- rows of every rank ---------------------------------------------------------------


def from_local(tree: Any, mesh: DeviceMesh) -> Any:
    """Put the rows that each rank has loaded together to the global batch.

    Args:
        tree: This rank's rows: a pytree of tensors `[rows, ...]`. On an emulated mesh a
            list of such trees, one for each rank. The number of rows may differ.
        mesh: The mesh; rows follow the order of the ranks on its batch axes.

    Returns:
        The same tree with DTensor leaves `[sum of rows, ...]`, split over the batch
        axes. Rows move only if the ranks hold other numbers of them than the split asks
        for. Where DTensor cannot say an uneven split over two axes, the leaf is the
        full tensor.

    Raises:
        ArgumentError: A leaf without a leading dimension, or trees that differ.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> mesh = yf.make_mesh(fsdp=2, emulate=True)
        >>> batch = yf.from_local([torch.zeros(4, 3), torch.ones(4, 3)], mesh)
        >>> batch.shape
        torch.Size([8, 3])
    """
    world = world_of(mesh)
    if not is_emulated(mesh):
        return map_with_paths(
            lambda p, x: _join_processes(world, mesh, p, x), tree, "tree"
        )
    ranks = mesh.size()
    if not isinstance(tree, list | tuple) or len(tree) != ranks:
        raise ArgumentError(
            f"on an emulated mesh from_local takes a list of {ranks} trees, one for "
            "each rank."
        )
    paths, _, spec = flatten_with_paths(tree[0], "tree")
    rows = [flatten(part)[0] for part in tree]
    if any(flatten(part)[1] != spec for part in tree):
        raise ArgumentError("the trees of the ranks have different structures.")
    leaves = [
        _join(world, mesh, path, [row[n] for row in rows])
        for n, path in enumerate(paths)
    ]
    return unflatten(spec, leaves)


def _join(
    world: World, mesh: DeviceMesh, path: str, parts: Sequence[torch.Tensor]
) -> Any:
    """Parts of all ranks, of which only those along the batch axes are read."""
    for part in parts:
        _check_rows(path, part)
    _check_alike(path, [(part.shape[1:], part.dtype) for part in parts])
    return _batch_leaf(world, mesh, path, torch.cat(_along_axes(mesh, parts)))


def _batch_leaf(
    world: World, mesh: DeviceMesh, path: str, whole: torch.Tensor
) -> torch.Tensor:
    sizes = axis_sizes(mesh)
    ours = split_on(whole.shape, batch_axes(mesh), sizes)
    if to_torch(ours, whole.shape, sizes) is None:
        return whole
    return _distribute_leaf(world, mesh, path, whole, batch_placements(whole, mesh))


def _join_processes(world: Any, mesh: DeviceMesh, path: str, part: Any) -> Any:
    _check_rows(path, part)
    found = _along_batch(world, mesh, (part.shape[0], (part.shape[1:], part.dtype)))
    counts = [rows for rows, _ in found]
    _check_alike(path, [kind for _, kind in found])
    shape = (sum(counts), *part.shape[1:])
    ours = split_on(shape, batch_axes(mesh), axis_sizes(mesh))
    placed = to_torch(ours, shape, axis_sizes(mesh))
    parts = torch.empty(shape[0], device="meta")
    wanted = _along_axes(
        mesh, [part_of(parts, ours, c).shape[0] for c in coordinates(mesh)]
    )
    if placed is None or counts != wanted:
        return _batch_leaf(
            world, mesh, path, torch.cat(_along_batch(world, mesh, part))
        )
    stride = torch.empty(shape, device="meta").stride()
    meta = Meta(shape, part.dtype, tuple(stride), part.device)
    return world.leaf(part.contiguous(), mesh, meta, batch_placements(part, mesh))


def _along_axes(mesh: DeviceMesh, items: Sequence[Any]) -> list[Any]:
    """Of one item for each rank, those along the batch axes."""
    keep = set(batch_axes(mesh))
    return [
        item
        for item, at in zip(items, coordinates(mesh), strict=True)
        if all(position == 0 or axis in keep for axis, position in enumerate(at))
    ]


def _along_batch(world: Any, mesh: DeviceMesh, item: Any) -> list[Any]:
    """This rank's item and those of the other ranks along the batch axes, in order."""
    return gathered(item, [world.groups[axis] for axis in batch_axes(mesh)])


def _check_rows(path: str, part: Any) -> None:
    if (
        not isinstance(part, torch.Tensor)
        or isinstance(part, DTensor)
        or not part.dim()
    ):
        raise ArgumentError(
            f"{path} is {_shown(part)}; from_local takes each rank's rows as plain "
            "tensors [rows, ...]."
        )


def _check_alike(path: str, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> None:
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            first, other = (
                f"{d}[rows, {str(list(s))[1:]}" for s, d in (kinds[0], kind)
            )
            raise ArgumentError(
                f"{path} is {first} on one rank and {other} on another (number {rank} "
                "along the batch), so the rows make no batch. Give all ranks rows of "
                "the same shape and dtype."
            )


def _shown(part: Any) -> str:
    if isinstance(part, torch.Tensor):
        return f"a {type(part).__name__} of shape {tuple(part.shape)}"
    return f"a {type(part).__name__}"
