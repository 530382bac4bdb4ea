"""Meshes: real ones over processes, emulated ones inside of one process."""

import atexit
import contextlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from ._errors import ArgumentError
from ._layout import SUM, WHOLE, Placement, Placements, Split, even_chunk, interval
from ._ranks import RankError, absent, ranks_text, waiting
from ._torch import HashStore, offline_mesh, rendezvous


def gathered(value: Any, groups: Sequence[dist.ProcessGroup | None]) -> list[Any]:
    """The value of every rank along these axes, in their order; a collective.

    The last axis is gathered first; one of a single rank has no group.
    """
    found = [value]
    for group in reversed(groups):
        if group is not None:
            rows: list[Any] = [None] * dist.get_world_size(group)
            with waiting(group):
                dist.all_gather_object(rows, found, group=group)
            found = [item for row in rows for item in row]
    return found


class EmulatedMesh(DeviceMesh):
    """A mesh whose ranks all live in this process; it has no process groups."""

    @property
    def _dim_group_names(self) -> Any:  # type: ignore[override]  # asked by DTensor
        raise ArgumentError(
            "this mesh is emulated, so DTensor's own communication (full_tensor, "
            "redistribute) cannot run on it. Use yf.full(tree) for the full values."
        )


def make_mesh(
    *sizes_without_names: int,
    device_type: str | None = None,
    emulate: bool = False,
    timeout: float | None = None,
    **axes: int,
) -> DeviceMesh:
    """A mesh of ranks with named axes.

    Starts the default process group if none runs, from torchrun's variables, and ends
    it when the process exits; without torchrun, the process is alone. State is sharded
    on the axis `fsdp` (the only axis, whatever its name, of a mesh with one axis); the
    batch is split over `replicate` and `fsdp`.

    Args:
        device_type: "cpu" or "cuda"; by default "cuda" if there is a device.
        emulate: Let all ranks live in this process, for notebooks and tests.
        timeout: Seconds that a rank waits for another one, at the start and in every
            collective, before it raises; by default torch's: 30 minutes, 10 with NCCL.
            Of no effect if a process group runs already.
        **axes: The number of ranks along each axis, outermost first.
        sizes_without_names: None; there to say that every axis has a name.

    Returns:
        The mesh.

    Raises:
        ArgumentError: No axis, a size below one, several axes of which none is `fsdp`,
            another number of ranks than processes run, or no positive time-out.
        RankError: A rank did not come within the time-out.

    Example:
        >>> import yafsdp_fn as yf
        >>> yf.make_mesh(emulate=True, replicate=2, fsdp=4).shape
        (2, 4)
    """
    if sizes_without_names:
        raise ArgumentError(
            f"make_mesh{sizes_without_names}: every axis has a name; write "
            f"make_mesh(fsdp={sizes_without_names[-1]})."
        )
    _check_axes(axes)
    device = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes, names = tuple(axes.values()), tuple(axes)
    if emulate:
        return offline_mesh(device, sizes, names, EmulatedMesh)
    if timeout is not None and not timeout > 0:
        raise ArgumentError(f"timeout={timeout!r}: write seconds, such as timeout=600.")
    _ensure_process_group(device, timeout)
    _check_world(math.prod(sizes), axes)
    return init_device_mesh(device, sizes, mesh_dim_names=names)


def _check_axes(axes: dict[str, int]) -> None:
    if not axes:
        raise ArgumentError("a mesh needs an axis: write make_mesh(fsdp=8).")
    for name, size in axes.items():
        if type(size) is not int or size < 1:
            raise ArgumentError(
                f"axis {name}={size!r}: the number of ranks must be an int >= 1."
            )
    if len(axes) > 1 and "fsdp" not in axes:
        raise ArgumentError(
            f"a mesh with the axes {', '.join(axes)} has none called 'fsdp', so it is "
            "not known on which axis state is sharded. Name that axis fsdp."
        )


def _ensure_process_group(device: str, timeout: float | None) -> None:
    if dist.is_initialized():
        return
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        _start(backend, None if timeout is None else timedelta(seconds=timeout))
        atexit.register(_end_process_group)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _start(backend: str, timeout: timedelta | None) -> None:
    """Begin the process group of torchrun's variables; say who did not come."""
    within: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store, rank, world = rendezvous(**within)
    store.set(f"{_ARRIVED}/{rank}", "")
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world,
            **within,
        )
    except RuntimeError as error:
        missing = absent(store, _ARRIVED, range(world), seconds=1)
        if not missing:
            raise
        raise RankError(
            f"rank {rank} waited at the start for {ranks_text(missing)} of {world}, "
            f"which ended, hangs, or was not started. {error}"
        ) from error


_ARRIVED = "yafsdp_fn/arrived"


def _end_process_group() -> None:
    """Leave together: gloo aborts a process that goes while a peer still talks to it.

    A rank that fails does not wait for the others, which wait for it elsewhere.
    """
    if not dist.is_initialized():
        return
    failed = getattr(sys, "last_value", None) is not None
    if not failed and dist.get_backend() == "gloo":
        with contextlib.suppress(RuntimeError):
            dist.monitored_barrier(timeout=timedelta(seconds=60))
    dist.destroy_process_group()


def _check_world(ranks: int, axes: dict[str, int]) -> None:
    world = dist.get_world_size()
    if ranks == world:
        return
    shown = ", ".join(f"{name}={size}" for name, size in axes.items())
    raise ArgumentError(
        f"make_mesh({shown}) has {ranks} ranks, but {world} process(es) run. Start "
        f"{ranks} (torchrun --nproc-per-node {ranks}, or yf.launch(..., nprocs={ranks})"
        f"), change the sizes, or write make_mesh({shown}, emulate=True)."
    )


# --- geometry -------------------------------------------------------------------------


def is_emulated(mesh: DeviceMesh) -> bool:
    """Whether all ranks of a mesh live in this process."""
    return isinstance(mesh, EmulatedMesh)


def axis_sizes(mesh: DeviceMesh) -> tuple[int, ...]:
    """Ranks along each axis."""
    return tuple(mesh.shape)


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Names of the axes; those without a name are called by their number."""
    names = mesh.mesh_dim_names
    return names or tuple(f"axis{n}" for n in range(mesh.ndim))


def coordinates(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """The coordinates of all ranks, in the order of the ranks."""
    return list(itertools.product(*(range(n) for n in mesh.shape)))


def own_coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    """The coordinate of this process.

    Raises:
        ArgumentError: This process is not on the mesh.
    """
    found = mesh.get_coordinate()
    if found is None:
        raise ArgumentError(f"rank {dist.get_rank()} is not on the mesh {mesh}.")
    return tuple(found)


def state_axis(mesh: DeviceMesh) -> int:
    """The axis on which state is sharded.

    Raises:
        ArgumentError: The mesh has several axes and none is called `fsdp`.
    """
    if mesh.ndim == 1:
        return 0
    if "fsdp" not in axis_names(mesh):
        raise ArgumentError(
            f"the mesh has the axes {axis_names(mesh)} and none is called 'fsdp', so "
            "it is not known on which axis state is sharded. Make it with "
            "yf.make_mesh(replicate=..., fsdp=...)."
        )
    return axis_names(mesh).index("fsdp")


def batch_axes(mesh: DeviceMesh) -> tuple[int, ...]:
    """The axes over which the batch is split."""
    state = state_axis(mesh)
    names = axis_names(mesh)
    return tuple(a for a in range(mesh.ndim) if a == state or names[a] == "replicate")


# --- placements on a mesh -------------------------------------------------------------


def split_on(
    shape: Sequence[int], axes: Sequence[int], sizes: Sequence[int], dim: int = 0
) -> Placements:
    """Split one dimension over axes, outermost first; axes of one rank split nothing.

    >>> split_on((10, 4), (0, 1), (2, 2))
    (Split(dim=0, chunk=5), Split(dim=0, chunk=3))
    """
    placements: list[Placement] = [WHOLE] * len(sizes)
    length = shape[dim]
    for axis in axes:
        if sizes[axis] > 1:
            length = even_chunk(length, sizes[axis])
            placements[axis] = Split(dim, length)
    return tuple(placements)


def from_torch(
    placements: Sequence[TorchPlacement],
    shape: Sequence[int],
    sizes: Sequence[int],
    path: str,
) -> Placements:
    """DTensor's placements as ours.

    Raises:
        ArgumentError: A placement that is none of Shard, Replicate, Partial("sum"), or
            one dimension that is split unevenly by two axes.
    """
    found: list[Placement] = [WHOLE] * len(sizes)
    lengths = list(shape)
    for axis, placement in enumerate(placements):
        if sizes[axis] == 1 or placement.is_replicate():
            continue
        if isinstance(placement, Shard):
            dim = placement.dim % len(shape)
            length = even_chunk(lengths[dim], sizes[axis])
            _check_nested(
                lengths[dim] != shape[dim], shape, dim, placements, sizes, path
            )
            found[axis], lengths[dim] = Split(dim, length), length
        elif placement.is_partial() and getattr(placement, "reduce_op", "") == "sum":
            found[axis] = SUM
        else:
            raise ArgumentError(
                f"{path} has the placement {placement}; use Shard, Replicate or "
                "Partial."
            )
    return tuple(found)


def _check_nested(
    nested: bool,
    shape: Sequence[int],
    dim: int,
    placements: Sequence[TorchPlacement],
    sizes: Sequence[int],
    path: str,
) -> None:
    ranks = math.prod(
        n for n, p in zip(sizes, placements, strict=True) if p.is_shard(dim)
    )
    if nested and shape[dim] % ranks:
        raise ArgumentError(
            f"{path}: dimension {dim} of length {shape[dim]} is sharded by several "
            f"mesh axes with {ranks} ranks together, which must divide it. Shard it "
            "on one axis, or pass the full tensor."
        )


def to_torch(
    placements: Placements, shape: Sequence[int], sizes: Sequence[int]
) -> tuple[TorchPlacement, ...] | None:
    """Our placements as DTensor's, or None where DTensor cannot say them."""
    found: list[TorchPlacement] = []
    for placement in placements:
        if isinstance(placement, Split):
            found.append(Shard(placement.dim))
        elif placement == WHOLE:
            found.append(Replicate())
        else:
            return None
    try:
        same = from_torch(found, shape, sizes, "output") == placements
    except ArgumentError:
        return None
    return tuple(found) if same else None


def part_of(
    tensor: torch.Tensor, placements: Placements, coordinate: Sequence[int]
) -> torch.Tensor:
    """The view of a whole tensor that the rank at a coordinate holds."""
    for dim in range(tensor.dim()):
        start, stop = interval(tensor.shape[dim], dim, placements, coordinate)
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def mesh_of(
    leaves: Sequence[Any], paths: Callable[[], Sequence[str]]
) -> DeviceMesh | None:
    """The one mesh of all DTensors among the leaves, or None if there is no DTensor.

    `paths` names the leaves; it is called for an error alone.

    Raises:
        ArgumentError: Two DTensors lie on different meshes.
    """
    found = [(n, x.device_mesh) for n, x in enumerate(leaves) if isinstance(x, DTensor)]
    for position, mesh in found[1:]:
        first, other = found[0]
        if mesh is not other and not same_mesh(other, mesh):
            names = paths()
            raise ArgumentError(
                f"{names[first]} lies on the mesh {other} and {names[position]} on "
                f"{mesh}. Put all of them on one: yf.distribute(yf.full(tree), mesh)."
            )
    return found[0][1] if found else None


def same_mesh(first: DeviceMesh, second: DeviceMesh) -> bool:
    """Whether two meshes have the same ranks and axes, emulated both or neither."""
    return first == second and is_emulated(first) == is_emulated(second)
