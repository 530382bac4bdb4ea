"""assert_agrees: a step sharded and unsharded, and where the two differ first."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._arguments import Call, Signature
from .._check import check
from .._distribute import Choose, TorchPlacements, distribute, full
from .._errors import ArgumentError
from .._graph import Ref
from .._layout import Pending
from .._mesh import axis_names, axis_sizes, from_torch
from .._program import Adjust, Instruction, Program, Start, Wait
from .._shard import ShardedFunction, shard
from .._stages import Lowered
from .._tree import flatten, flatten_with_paths
from .._world import ProcessWorld, world_of
from ._compare import EXACT, Difference, Tolerance, first_difference


def assert_agrees(
    step: Callable[..., Any],
    *args: Any,
    mesh: DeviceMesh,
    steps: int = 3,
    rtol: float | None = None,
    atol: float | None = None,
    placements: TorchPlacements | Choose | None = None,
    **shard_options: Any,
) -> ShardedFunction[..., Any]:
    """Execute a step sharded and unsharded, and compare all that it returns.

    State is distributed, the batch passed as it is. After each call both go on from
    their own results: an element of what is returned takes the place of the state
    argument whose structure, shapes and dtypes it has. Structure, dtypes, shapes, the
    strides of what replaces an argument, and values have to agree, on every rank; and
    every program has to fulfil its specification, `yf.check`.

    Args:
        step: A pure function, or a sharded one, which is compared with the function
            that it was made of and keeps its options if none are given here.
        *args: Its arguments: trees of full, plain tensors, the same on every rank.
        mesh: Where the sharded step runs. Of a mesh of processes all ranks call this.
        steps: How often to call the step, at least once.
        rtol: How far floats may differ, as a part of the largest finite magnitude of
            their leaf. By default 1e-9 in float64, 1e-5 in float32, 2e-2 in bfloat16,
            4e-3 in float16. Integers and truth values agree exactly, NaN with NaN.
        atol: Added to that, in the unit of the leaf; by default nothing.
        placements: Where the state lies, as in `yf.distribute`.
        **shard_options: Options of `yf.shard`, such as `batch_argnums`.

    Returns:
        The sharded function that was called, for further questions.

    Raises:
        AssertionError: The two differ. Names the call, the path of the first leaf that
            differs, the index of its first such element, both values, and the
            instructions of the program that made it. On all ranks, if on one.
        ProgramError: A program breaks its specification.
        ArgumentError: Arguments that are distributed already, or no state among them;
            and whatever else `yf.shard` refuses.
        TraceError: The step is not pure.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> from torch.func import grad_and_value
        >>> def step(params, batch):
        ...     loss = lambda p: (batch @ p["w"]).square().mean()
        ...     grads, value = grad_and_value(loss)(params)
        ...     return {"w": params["w"] - 0.1 * grads["w"]}, value
        >>> params, batch = {"w": torch.ones(5, 2)}, torch.ones(6, 5)
        >>> mesh = yf.make_mesh(fsdp=4, emulate=True)
        >>> sharded = yf.testing.assert_agrees(step, params, batch, mesh=mesh)
        >>> sharded.trace_count()
        1
    """
    _check_request(mesh, steps)
    sharded = _sharded(step, mesh, shard_options)
    call = sharded._signature.bind(args, {})
    _refuse(call)
    runs = _Runs(sharded, call.bound.arguments, mesh, placements)
    for number in range(1, steps + 1):
        found, wanted = runs.results()
        lowered = runs.lowered()
        check(lowered.plan)
        message = _message(found, wanted, lowered, Tolerance(rtol, atol))
        place = f"call {number} of {steps} on the mesh {_shown(mesh)}"
        _raise_on_all_ranks(mesh, message and f"{place}: {message}")
        runs.go_on(found, wanted)
    return sharded


def _sharded(
    step: Callable[..., Any], mesh: DeviceMesh, options: Mapping[str, Any]
) -> ShardedFunction[..., Any]:
    """The step to compare: one that has no programs yet."""
    if isinstance(step, ShardedFunction) and not options:
        names = step._signature
        kept = (sorted(names.batch), sorted(names.static), sorted(names.donate))
        return ShardedFunction(step._fn, mesh, *kept, step._schedule)
    return shard(step, mesh=mesh, **options)


# --- requests -------------------------------------------------------------------------


def _check_request(mesh: DeviceMesh, steps: int) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"mesh={mesh!r} is no mesh. Write mesh=yf.make_mesh(fsdp=4, emulate=True)."
        )
    if type(steps) is not int or steps < 1:
        raise ArgumentError(f"steps={steps!r}: the number of calls is an int >= 1.")


def _refuse(call: Call) -> None:
    """Refuse arguments that cannot be run plain, or of which nothing is sharded."""
    for path, leaf in zip(call.paths(), call.leaves, strict=True):
        if isinstance(leaf, DTensor):
            raise ArgumentError(
                f"{path} is a DTensor. assert_agrees takes full tensors, for the "
                "unsharded step, and distributes them itself: pass yf.full(tree), and "
                "placements= if the default is not what you mean."
            )
    owned = zip(call.owners(), call.leaves, strict=True)
    held = [n for n, leaf in owned if isinstance(leaf, torch.Tensor)]
    if not set(held) - call.signature.batch:
        raise ArgumentError(
            f"there is no tensor of state among the arguments: {_batch(call)} is the "
            "batch, so nothing is kept in shards. Pass parameters too, or say with "
            "batch_argnums which arguments are the batch."
        )


def _batch(call: Call) -> str:
    return ", ".join(sorted(call.signature.batch)) or "nothing"


# --- two runs -------------------------------------------------------------------------


class _Runs:
    """The arguments of both runs, by parameter."""

    def __init__(
        self,
        sharded: ShardedFunction[..., Any],
        arguments: Mapping[str, Any],
        mesh: DeviceMesh,
        placements: TorchPlacements | Choose | None,
    ) -> None:
        self.sharded, self.mesh, self.placements = sharded, mesh, placements
        self.plain = dict(arguments)
        self.placed = {name: self._place(name) for name in self.plain}

    def results(self) -> tuple[Any, Any]:
        """What the step returns, sharded and unsharded.

        The sharded one first: it refuses a step that would edit the arguments of both.
        """
        found = _call(self.sharded, self._signature, self.placed)
        return found, _call(self.sharded._fn, self._signature, self.plain)

    def lowered(self) -> Lowered:
        """The program that was executed."""
        bound = _bound(self._signature, self.placed)
        call, captured = self.sharded._bind(bound.args, bound.kwargs)
        key = self.sharded._key(call, captured, self.mesh)
        return self.sharded._cache[key].lowered

    def go_on(self, found: Any, wanted: Any) -> None:
        """Put results in the places of the state that they are the new values of."""
        new, given = _elements(found), self._signature.donate
        for name, position in self._successors(_elements(wanted)).items():
            if position is not None:
                self.plain[name] = _elements(wanted)[position]
                self.placed[name] = new[position]
            elif name in given:  # its memory is gone
                self.placed[name] = self._place(name)

    @property
    def _signature(self) -> Signature:
        return self.sharded._signature

    def _place(self, name: str) -> Any:
        tree = self.plain[name]
        if name in self._signature.static:
            return tree
        if name not in self._signature.batch:
            return distribute(tree, self.mesh, self.placements)
        return _cloned(tree) if name in self._signature.donate else tree

    def _successors(self, elements: Sequence[Any]) -> dict[str, int | None]:
        """For every argument the result that follows it, that in its position first."""
        fixed = self._signature.batch | self._signature.static
        states = [name for name in self.plain if name not in fixed]
        found: dict[str, int | None] = dict.fromkeys(self.plain)
        for position, name in enumerate(states):
            same = [n for n, e in enumerate(elements) if _alike(self.plain[name], e)]
            if same:
                found[name] = position if position in same else same[0]
        return found


def _bound(signature: Signature, arguments: dict[str, Any]) -> inspect.BoundArguments:
    return inspect.BoundArguments(signature.signature, arguments)  # type: ignore[arg-type]


def _call(
    fn: Callable[..., Any], signature: Signature, arguments: dict[str, Any]
) -> Any:
    bound = _bound(signature, arguments)
    return fn(*bound.args, **bound.kwargs)


def _elements(results: Any) -> tuple[Any, ...]:
    return results if type(results) is tuple else (results,)


def _cloned(tree: Any) -> Any:
    leaves, spec = flatten(tree)
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
    return optree.tree_unflatten(spec, copies)


def _alike(argument: Any, result: Any) -> bool:
    """Whether a result has the structure, shapes and dtypes of an argument."""
    before, spec = flatten(argument)
    after, after_spec = flatten(result)
    return spec == after_spec and list(map(_kind, before)) == list(map(_kind, after))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.dtype)
    return type(leaf)


# --- the difference -------------------------------------------------------------------


def _message(
    found: Any, wanted: Any, lowered: Lowered, tolerance: Tolerance
) -> str | None:
    """The first difference of a call, with the instructions that made it."""
    whole = full(found)
    replacing = {n for n, r in enumerate(lowered.results) if r.argument is not None}
    difference = first_difference(whole, wanted, tolerance, replacing)
    difference = difference or _drift(found, whole, lowered.traced.mesh)
    if difference is None:
        return None
    made = _instructions(lowered, difference.leaf)
    return f"{difference}." + (f" It was made by\n{made}" if made else "")


def _drift(found: Any, whole: Any, mesh: DeviceMesh) -> Difference | None:
    """A leaf of which some ranks hold other values than those who were asked for it."""
    paths, leaves, _ = flatten_with_paths(found, "output")
    rows = zip(paths, leaves, flatten(whole)[0], strict=True)
    world = world_of(mesh)
    for number, (path, leaf, value) in enumerate(rows):
        if not isinstance(leaf, DTensor):
            continue
        placed = from_torch(leaf.placements, leaf.shape, axis_sizes(mesh), path)
        if any(isinstance(p, Pending) for p in placed):
            continue
        have, want = (world.tensors(world.part(x, placed)) for x in (leaf, value))
        for rank, parts in enumerate(zip(have, want, strict=True)):
            if difference := first_difference(*parts, EXACT, ()):
                text = f"{difference.text} on rank {rank}, as on the first one"
                return Difference(number, path, text)
    return None


def _instructions(lowered: Lowered, leaf: int | None) -> str:
    """The lines of the program that a leaf of the result comes from."""
    ref = None if leaf is None else lowered.plan.outputs[leaf]
    if ref is None:
        return ""
    program = lowered.plan
    made = [program._line(instruction) for instruction in _makers(program, ref)]
    label = program.values[ref.id].label
    return "\n".join(f"    {line}" for line in made or [f"{ref} input {label}"])


def _makers(program: Program, ref: Ref) -> list[Instruction]:
    """The operator that computed a value, and what moved it since."""
    writers = [i for i in program.instructions if ref in i.writes]
    if not writers:
        return []
    last = writers[-1]
    if isinstance(last, Adjust):
        return [*_makers(program, last.source), last]
    if isinstance(last, Wait):
        source = last.transfer.sources[last.transfer.targets.index(ref)]
        return [*_makers(program, source), Start(last.transfer), last]
    return [last]


def _raise_on_all_ranks(mesh: DeviceMesh, message: str | None) -> None:
    """Raise if there is a message on any rank: none is left waiting for the others."""
    world = world_of(mesh)
    found = [message]
    if isinstance(world, ProcessWorld):
        own = message and f"on rank {dist.get_rank()}, {message}"
        found = [text or None for text in world._all(own or "")]
    for text in found:
        if text is not None:
            raise AssertionError(text)


def _shown(mesh: DeviceMesh) -> str:
    pairs = zip(axis_names(mesh), axis_sizes(mesh), strict=True)
    return ", ".join(f"{name}={size}" for name, size in pairs)
