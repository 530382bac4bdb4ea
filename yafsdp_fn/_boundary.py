"""The edge of a program: leaves of a call become parts, parts become leaves again."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from ._arguments import Call
from ._capture import Captures
from ._distribute import default_placements, with_stride
from ._donate import refuse_donated, take, write_back
from ._errors import ArgumentError
from ._graph import Graph, Input
from ._layout import WHOLE, Meta, Placements, Split
from ._mesh import axis_sizes, batch_axes, from_torch, split_on, to_torch
from ._program import Program
from ._torch import storage_id
from ._world import Part, World

# --- in -------------------------------------------------------------------------------


def placements_of(leaf: Any, is_batch: bool, path: str, mesh: DeviceMesh) -> Placements:
    """How a leaf of an argument lies on the mesh.

    A DTensor keeps its placement. A plain tensor is the global value: of the batch it
    is split, of the state a floating leaf with a dimension is sharded, others whole.

    Raises:
        ArgumentError: A placement that cannot be used.
    """
    sizes = axis_sizes(mesh)
    if isinstance(leaf, DTensor):
        return _from_torch(tuple(leaf.placements), tuple(leaf.shape), sizes, path)
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return (WHOLE,) * len(sizes)
    if is_batch:
        return split_on(leaf.shape, batch_axes(mesh), sizes)
    placed = default_placements(leaf, mesh)
    return _from_torch(tuple(placed), tuple(leaf.shape), sizes, path)


def placed_key(call: Call, mesh: DeviceMesh) -> Hashable:
    """Equal for calls that the same program serves on a mesh."""
    batch = call.signature.batch
    owned = zip(call.leaves, call.owners(), strict=True)
    placed = tuple(placements_of(x, owner in batch, owner, mesh) for x, owner in owned)
    return (call.key(), placed, mesh, type(mesh), torch.get_default_dtype())


_from_torch = functools.lru_cache(maxsize=4096)(from_torch)


def input_placements(graph: Graph, mesh: DeviceMesh) -> list[Placements]:
    """The placement of every input of a graph.

    Raises:
        ArgumentError: A leaf of the batch has no leading dimension.
    """
    return [_input_placements(entry, mesh) for entry in graph.inputs]


def _input_placements(entry: Input, mesh: DeviceMesh) -> Placements:
    leaf = entry.example
    if entry.role == "batch" and isinstance(leaf, torch.Tensor) and leaf.dim() == 0:
        raise ArgumentError(
            f"{entry.path} has no leading dimension, so it cannot be split over the "
            "ranks. Give it one, or pass it as another argument (batch_argnums says "
            "which arguments are the batch)."
        )
    if entry.role in ("captured", "constant") and not isinstance(leaf, DTensor):
        return (WHOLE,) * mesh.ndim
    return placements_of(leaf, entry.role == "batch", entry.path, mesh)


def input_part(
    entry: Input, placed: Placements, call: Call, captured: Captures, world: World
) -> Part:
    """What the ranks hold of one input, at this call."""
    leaf = current(entry, call, captured)
    if not isinstance(leaf, torch.Tensor):
        leaf = torch.tensor(float(leaf), dtype=torch.float64)
    refuse_donated(entry.path, leaf)
    return world.part(leaf, placed)


def current(entry: Input, call: Call, captured: Captures) -> Any:
    """The tensor or number that an input stands for, at this call."""
    if isinstance(entry.source, torch.Tensor):
        return entry.source
    if entry.role == "captured":
        return captured.tensors[entry.source]
    return call.leaves[entry.source]


# --- out ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Where a leaf of the result goes.

    Attributes:
        value: A static value, or None for a tensor.
        meta: The tensor as the unsharded step returns it.
        argument: The leaf of the call whose place it takes, if any.
        placed: DTensor's placements; None for a replicated value, which is plain.
        is_float: The step returns a Python float.
        passed: The leaf of the call that it is, unchanged, if any.
        twin: An earlier result that it is the same as, if any.
        shared: It shares memory with an argument or another result.
    """

    value: Any = None
    meta: Meta | None = None
    argument: int | None = None
    placed: tuple[TorchPlacement, ...] | None = None
    is_float: bool = False
    passed: int | None = None
    twin: int | None = None
    shared: bool = False


def wanted_placements(
    call: Call, matched: Sequence[int | None], mesh: DeviceMesh
) -> list[Placements | None]:
    """For every leaf of the result the placement of the argument it replaces."""
    paths = call.paths()
    return [
        None if n is None else placements_of(call.leaves[n], False, paths[n], mesh)
        for n in matched
    ]


def describe_results(
    call: Call,
    graph: Graph,
    program: Program,
    matched: Sequence[int | None],
    mesh: DeviceMesh,
) -> list[Result]:
    """What to make of every output of a program."""
    rows = zip(graph.outputs, program.outputs, matched, strict=True)
    results = []
    for output, ref, argument in rows:
        if ref is None:
            results.append(Result(output.value))
            continue
        local = program.values[ref.id]
        leaf = None if argument is None else call.leaves[argument]
        kept = _torch_placements(local.placements, local.meta, leaf, mesh)
        # The unsharded description: a view's placed value may be another's.
        meta = _dense(graph.metas[output.value.id])
        results.append(Result(None, meta, argument, kept, output.is_float))
    return _with_sharing(graph, program, results)


def _dense(meta: Meta) -> Meta:
    """The description of a value of its own memory; a shard is never an expansion."""
    if 0 not in meta.stride:
        return meta
    like = torch.empty_strided(meta.shape, meta.stride, device="meta")
    return dataclasses.replace(meta, stride=torch.empty_like(like).stride())


def _with_sharing(
    graph: Graph, program: Program, results: Sequence[Result]
) -> list[Result]:
    """Find the results that share memory with an argument or another result."""
    owner_of = program.owner
    sources = {r.id: e for r, e in zip(program.inputs, graph.inputs, strict=True)}
    seen: dict[int, int] = {}
    found = []
    for n, (result, ref) in enumerate(zip(results, program.outputs, strict=True)):
        if ref is not None:
            owner = owner_of[ref.id]
            first = seen.setdefault(owner, n)
            entry = sources.get(ref.id)
            passed = (
                entry.source if entry and entry.role in ("state", "batch") else None
            )
            same = program.outputs[first] == ref and results[first] == result
            result = dataclasses.replace(
                result,
                passed=passed if isinstance(passed, int) else None,
                twin=first if same and first != n else None,
                shared=owner in sources or first != n,
            )
        found.append(result)
    return found


def expressible(placements: Placements, meta: Meta, mesh: DeviceMesh) -> bool:
    """Whether a DTensor can have these placements."""
    return to_torch(placements, meta.shape, axis_sizes(mesh)) is not None


def _torch_placements(
    placements: Placements, meta: Meta, leaf: Any, mesh: DeviceMesh
) -> tuple[TorchPlacement, ...] | None:
    if isinstance(leaf, DTensor):
        return tuple(leaf.placements)
    if isinstance(leaf, torch.Tensor):
        kept = default_placements(leaf, mesh)
    elif any(isinstance(p, Split) for p in placements):
        kept = to_torch(placements, meta.shape, axis_sizes(mesh)) or ()
    else:
        return None
    return tuple(kept) if any(p.is_shard() for p in kept) else None


def result_leaves(
    results: Sequence[Result],
    parts: Sequence[Part],
    call: Call,
    world: World,
    mesh: DeviceMesh,
) -> list[Any]:
    """The leaves of the result from what the ranks hold of them.

    No two leaves share memory unless they are one and the same object: else a later
    donation of one would change the other.
    """
    donated = call.donated()
    leaves: list[Any] = []
    for result, part in zip(results, parts, strict=True):
        passed = None if result.passed is None else call.leaves[result.passed]
        if result.meta is None:
            leaves.append(result.value)
        elif result.twin is not None:
            leaves.append(leaves[result.twin])
        elif result.passed in donated and isinstance(passed, DTensor):
            leaves.append(_result_leaf(result, part, call, world, mesh))
        elif isinstance(passed, DTensor) or (passed is not None and not result.placed):
            # The caller's own, unless it can't be used any more.
            leaves.append(passed.detach() if result.passed in donated else passed)
        else:
            own = _cloned(part, world) if result.shared else part
            leaves.append(_result_leaf(result, own, call, world, mesh))
    return leaves


def _cloned(part: Part, world: World) -> Part:
    return world.together([tensor.clone() for tensor in world.tensors(part)])


def _result_leaf(
    result: Result, part: Part, call: Call, world: World, mesh: DeviceMesh
) -> Any:
    meta, argument = result.meta, result.argument
    assert meta is not None
    before = None if argument is None else call.leaves[argument]
    placed = before.placements if isinstance(before, DTensor) else result.placed
    if placed is not None:
        return world.leaf(part, mesh, meta, placed)
    plain = with_stride(world.plain(part), meta.stride)
    return plain.item() if result.is_float else plain


# --- donation -------------------------------------------------------------------------


def refuse_shared_donations(call: Call, captured: Captures, world: World) -> None:
    """Refuse to donate memory that something else that the step reads holds too.

    Raises:
        ArgumentError: Names both.
    """
    donated = call.donated()
    if not donated:
        return
    holders: dict[int, int] = {}
    leaves = [*call.leaves, *captured.tensors]
    for n, leaf in enumerate(leaves):
        memory = _memory_of(leaf, world)
        other = n if memory is None else holders.setdefault(memory, n)
        if other != n and donated & {n, other}:
            paths = [*call.paths(), *["a captured tensor"] * len(captured.tensors)]
            raise ArgumentError(
                f"{paths[other]} and {paths[n]} share their memory, so it cannot "
                "be donated: results would overwrite each other. Clone one of "
                "them, or leave the argument out of donate_argnums."
            )


def _memory_of(leaf: Any, world: World) -> int | None:
    """What tells memory apart that a leaf holds in this process, if any."""
    if not isinstance(leaf, torch.Tensor):
        return None
    held = world.tensors(world.part(leaf, ()))[0] if isinstance(leaf, DTensor) else leaf
    return storage_id(held) if held.numel() else None


def donate(
    call: Call, results: Sequence[Result], parts: list[Part], world: World, step: str
) -> None:
    """Move results into the shards of donated arguments and mark those as taken."""
    given = sorted(call.donated())
    if not given:
        return
    goes = {r.argument: n for n, r in reversed(list(enumerate(results))) if r.meta}
    shards = [n for n in given if isinstance(call.leaves[n], DTensor)]
    _write(call, shards, goes, parts, world)
    give_up(call, step)


def give_up(call: Call, step: str) -> None:
    """Mark all donated leaves as taken by a step."""
    paths = call.paths()
    for n in sorted(call.donated()):
        if isinstance(call.leaves[n], torch.Tensor):
            take(call.leaves[n], f"{paths[n]} to {step}")


def _write(
    call: Call,
    shards: Sequence[int],
    goes: dict[int | None, int],
    parts: list[Part],
    world: World,
) -> None:
    """Write back rank by rank; an emulated world has several here."""
    held = {n: world.tensors(world.part(call.leaves[n], ())) for n in shards}
    made = [[] if p is None else list(world.tensors(p)) for p in parts]
    for rank in range(max((len(row) for row in held.values()), default=0)):
        results = [made[goes[n]][rank] if n in goes else None for n in shards]
        received = {goes[n] for n in shards if n in goes}
        free = [n for n, row in enumerate(made) if row and n not in received]
        others = [made[n][rank] for n in free]
        write_back([held[n][rank] for n in shards], results, others)
        for n, result in zip(shards, results, strict=True):
            if n in goes and result is not None:
                made[goes[n]][rank] = result
        for n, other in zip(free, others, strict=True):
            made[n][rank] = other
    for n, row in enumerate(made):
        if row:
            parts[n] = world.together(row)
