"""init: what an initialiser makes, made in parts; eval_shape: what it would make.

Every leaf is computed by itself, in blocks of rows that do not depend on the mesh, and
a rank computes those of its shard: no rank holds more than its shards and a block, and
the values are the same for every mesh. A leaf whose rows depend on each other (one that
is orthogonal, or divided by its norm) is computed whole, before the next one.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ._arguments import Call, signature_of
from ._bind import Rank
from ._boundary import current
from ._capture import Captures, captures
from ._distribute import Choose, TorchPlacements, distribute
from ._errors import ArgumentError
from ._graph import Graph, Output, Ref, live_nodes, read_by
from ._layout import WHOLE, Meta, Placements, Split, interval
from ._lower import lower
from ._mesh import axis_sizes, from_torch, mesh_of, same_mesh
from ._place import place
from ._plan import plan
from ._program import Program
from ._schedule import Schedule
from ._shard import agree_on, constants_of, traced
from ._target import Target
from ._tree import flatten, flatten_with_paths, unflatten
from ._world import world_of

_BLOCK_BYTES = 1 << 20  # random numbers need some ten times that while they are made


def init(
    fn: Callable[..., Any],
    mesh: DeviceMesh,
    placements: TorchPlacements | Choose | None = None,
) -> Callable[..., Any]:
    """A function that makes the tree of `fn(*args)` in shards.

    It returns what `yf.distribute(fn(*args), mesh, placements)` returns, up to rounding
    and alike for every mesh, and no rank ever holds the tree: a leaf whose rows are
    made of a key and of their positions (`yf.random`, zeros, ones, and what is computed
    of them element by element) is made by its rows, any other one whole, one after the
    other. What is made of DTensors is made of their shards:
    `yf.init(optimiser.init, mesh)(params)` places every leaf of the state as the
    parameter that it is named and shaped like.

    The idea is that of `jax.jit(init, out_shardings=...)`.

    Args:
        fn: An initialiser: a pure function that returns a tree of tensors.
        mesh: Where to put the tree.
        placements: As for `distribute`.

    Returns:
        A function of the arguments of `fn`: keys and other plain tensors, the same on
        every rank, DTensors on the mesh, and static values.

    Raises:
        TraceError: At the call: `fn` is not pure, or needs a value to be traced; random
            numbers without a key are refused.
        ArgumentError: At the call: a DTensor lies on another mesh, or placements do
            not fit.
        MismatchError: At the call: the ranks would make different trees.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> def make(key):
        ...     return {"w": 0.02 * yf.random.normal(key, (6, 4)), "b": torch.zeros(6)}
        >>> key, mesh = yf.random.key(0), yf.make_mesh(fsdp=4, emulate=True)
        >>> params = yf.init(make, mesh)(key)
        >>> params["w"].placements, bool((yf.full(params)["w"] == make(key)["w"]).all())
        ((Shard(dim=0),), True)
    """

    def initialise(*args: Any, **kwargs: Any) -> Any:
        call, captured = _bound(fn, args, kwargs)
        failure, graph, like, text = None, None, None, ""
        try:
            _check_mesh(call, mesh)
            graph = traced(call, captured, False)
            chosen = placements or functools.partial(_as_argument, call)
            like = distribute(_shapes(graph), mesh, chosen)
            text = "\n".join([graph.as_text(), *constants_of(graph), *_placed(like)])
        except Exception as error:
            text, failure = f"error: {error}", error
        agree_on(mesh, text, failure)
        assert graph is not None
        return _made(graph, call, captured, like)

    return initialise


def eval_shape(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The shapes and dtypes of what a function would return; computes nothing.

    As `jax.eval_shape`. With `distribute` it gives a `like` for checkpoints that takes
    no memory: `yf.distribute(yf.eval_shape(make, key), mesh)`.

    Args:
        fn: A pure function of trees.
        *args: Its arguments; only shapes and dtypes of tensors are used.
        **kwargs: Others by name.

    Returns:
        The tree that `fn` would return, with tensors on the meta device.

    Raises:
        TraceError: `fn` is not pure, or needs a value to be traced.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> found = yf.eval_shape(lambda w: {"g": w.T @ w}, torch.ones(4, 2))
        >>> found["g"].shape, found["g"].device
        (torch.Size([2, 2]), device(type='meta'))
    """
    call, captured = _bound(fn, args, kwargs)
    return _shapes(traced(call, captured, False))


def _placed(like: Any) -> list[str]:
    """How the leaves are placed."""
    paths, leaves, _ = flatten_with_paths(like, "tree")
    rows = zip(paths, leaves, strict=True)
    return [f"{p} {x.placements}" for p, x in rows if isinstance(x, DTensor)]


def _check_mesh(call: Call, mesh: DeviceMesh) -> None:
    found = mesh_of(call.leaves, call.paths)
    if found is not None and not same_mesh(found, mesh):
        raise ArgumentError(
            f"the arguments lie on {found}, but init is for {mesh}. Distribute them on "
            "that mesh, or write init(fn, mesh) with theirs."
        )


def _as_argument(call: Call, path: str, leaf: torch.Tensor) -> TorchPlacements | None:
    """The placements of the DTensor whose name ends alike, and that has the shape."""
    found: list[tuple[int, TorchPlacements]] = []
    for name, argument in zip(call.paths(), call.leaves, strict=True):
        keys = name.removeprefix(name.partition("[")[0].partition(".")[0])
        alike = isinstance(argument, DTensor) and argument.shape == leaf.shape
        if alike and path.endswith(keys):
            found.append((len(keys), tuple(argument.placements)))
    return max(found, default=(0, None), key=lambda row: row[0])[1]


def _bound(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Call, Captures]:
    call = signature_of(fn, (), (), ()).bind(args, kwargs)
    return call, captures(fn, call.opaque())


# --- in parts -------------------------------------------------------------------------


def _shapes(graph: Graph) -> Any:
    """The results of a graph as tensors without data."""
    return unflatten(graph.spec, [_shape(graph, output) for output in graph.outputs])


def _shape(graph: Graph, output: Output) -> Any:
    if not isinstance(output.value, Ref):
        return output.value
    meta = graph.metas[output.value.id]
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _made(graph: Graph, call: Call, captured: Captures, like: Any) -> Any:
    """The results of a graph, each leaf placed as that of `like`."""
    leaves, _ = flatten(like)
    for n, (output, leaf) in enumerate(zip(graph.outputs, leaves, strict=True)):
        if isinstance(leaf, torch.Tensor):
            leaves[n] = _filled(
                _alone(graph, output), output.path, leaf, call, captured
            )
    return unflatten(graph.spec, leaves)


def _alone(graph: Graph, output: Output) -> Graph:
    """What one result is made of."""
    nodes = live_nodes(graph.nodes, (output,))
    used = read_by(nodes, (output,))
    inputs = tuple(entry for entry in graph.inputs if entry.ref.id in used)
    return replace(graph, inputs=inputs, nodes=nodes, outputs=(output,))


def _filled(
    graph: Graph, path: str, like: torch.Tensor, call: Call, captured: Captures
) -> torch.Tensor:
    """A leaf placed as `like`: of its blocks, those that lie in this process."""
    target = Target(path, like)
    inputs = [current(entry, call, captured) for entry in graph.inputs]
    if isinstance(like, DTensor) and any(isinstance(x, DTensor) for x in inputs):
        return _of_shards(graph, path, like, inputs)
    program, count, cut = _blocks(graph, like)
    with torch.no_grad():
        for number in range(count):
            bounds = [interval(n, d, cut, (number,)) for d, n in enumerate(like.shape)]
            offsets = [first for first, _ in bounds]
            sizes = [end - first for first, end in bounds]
            parts = list(target.overlaps(offsets, sizes))
            if parts:
                block = _run(program, number, inputs)
                for place, index in parts:
                    place.copy_(block[index])
    return target.leaf()


def _of_shards(
    graph: Graph, path: str, like: DTensor, inputs: Sequence[torch.Tensor]
) -> DTensor:
    """A leaf that is made of shards of others, as in a sharded step."""
    mesh, world = like.device_mesh, world_of(like.device_mesh)

    def placed(leaf: torch.Tensor) -> Placements:
        if not isinstance(leaf, DTensor):
            return (WHOLE,) * mesh.ndim
        return from_torch(leaf.placements, leaf.shape, axis_sizes(mesh), path)

    program = _program(graph, axis_sizes(mesh), [*map(placed, inputs)], placed(like))
    parts = [world.part(leaf, placed(leaf)) for leaf in inputs]
    (made,) = world.executor(program)(parts)
    own = world.together([part.clone() for part in world.tensors(made)])
    return world.leaf(own, mesh, Meta.of(like), like.placements)


def _blocks(graph: Graph, like: torch.Tensor) -> tuple[Program, int, Placements]:
    """A program for the blocks of a leaf, how many they are, and how they cut it.

    The blocks are placed like the shards of a mesh with as many ranks. If its program
    communicates, the blocks depend on each other, and there is one.
    """
    inputs = [(WHOLE,)] * len(graph.inputs)
    for dim in _dims(like) if like.numel() else ():
        length = like.shape[dim]
        rows = max(1, _BLOCK_BYTES * length // like.nbytes)
        rows -= rows % 4 if rows > 4 else 0  # as many random numbers have one counter
        if rows < length:
            cut, count = (Split(dim, rows),), -(-length // rows)
            program = _program(graph, (count,), inputs, cut)
            if not any(True for _ in program.transfers()):
                return program, count, cut
    return _program(graph, (1,), inputs, (WHOLE,)), 1, (WHOLE,)


def _dims(like: torch.Tensor) -> list[int]:
    """The dimensions to cut: that of the shards, or, if its rows exceed a block,
    the longest one first.
    """
    if not like.dim():
        return []
    placements = like.placements if isinstance(like, DTensor) else ()
    sharded = next((p.dim for p in placements if isinstance(p, Shard)), 0)
    longest = max(range(like.dim()), key=like.shape.__getitem__)
    dims = list(dict.fromkeys([sharded, longest]))
    return sorted(dims, key=lambda dim: like.nbytes // like.shape[dim] > _BLOCK_BYTES)


def _program(
    graph: Graph,
    sizes: Sequence[int],
    inputs: Sequence[Placements],
    wanted: Placements,
) -> Program:
    placed = place(graph, sizes, inputs, [wanted], lambda *_: True, Schedule())
    axes = [f"axis{n}" for n in range(len(sizes))]
    return plan(placed, lower(placed), axes, Schedule(), {})


def _run(program: Program, number: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of the rank that makes a block."""
    arena = torch.empty(program.arena, dtype=torch.uint8, device=program.device)
    rank = Rank(program, (number,), arena)
    actions = [rank.action(instruction) for instruction in program.instructions]
    rank.begin(inputs)
    for action in filter(None, actions):
        action()
    (made,) = rank.results()
    assert made is not None
    return made
