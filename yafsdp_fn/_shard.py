"""shard: a step for one device and the whole batch becomes the step on a mesh."""

import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from ._arguments import Call, Names, signature_of
from ._boundary import placed_key
from ._capture import Captures, captures
from ._donate import refuse_donated
from ._errors import ArgumentError, MismatchError, YafsdpError
from ._graph import Graph, Ref
from ._mesh import mesh_of, same_mesh
from ._outside import (
    differentiable_call,
    is_differentiated,
    like_arguments,
    match_gradients,
    pullback,
    refuse_captured_leaves,
)
from ._purity import checked_purity
from ._results import Matcher, match
from ._schedule import Schedule
from ._stages import Compiled, Lowered, Traced
from ._torch import is_functorch_wrapped
from ._trace import trace
from ._world import world_of

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

_tracing = threading.local()


class ShardedFunction(Generic[Parameters, Returned]):
    """A pure function over the shards of a mesh; made by `shard`."""

    def __init__(
        self,
        fn: Callable[Parameters, Returned],
        mesh: DeviceMesh | None,
        batch: Names,
        static: Names,
        donate: Names,
        schedule: Schedule = Schedule(),  # noqa: B008
    ) -> None:
        functools.update_wrapper(self, fn)
        self._options = (mesh, batch, static, donate, schedule)
        self._fn = fn
        self._mesh = mesh
        self._schedule = schedule
        self._signature = signature_of(fn, batch, static, donate)
        self._cache: dict[Hashable, Compiled] = {}
        self._frozen: set[Hashable] = set()  # keys whose floats are static
        self._traces = 0
        self._match: Matcher = match
        self._gradient: ShardedFunction[..., Any] | None = None

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        """Execute the step; traces and plans it for arguments of a new kind."""
        if getattr(_tracing, "active", False):
            return self._fn(*args, **kwargs)
        call, captured = self._bind(args, kwargs)
        if is_differentiated(call):
            refuse_captured_leaves(call, captured)
            return differentiable_call(self, call)
        mesh = self._mesh_for(call, captured)
        try:
            _refuse(call, captured)
            key = self._key(call, captured, mesh)
        except YafsdpError as error:
            if not self._cache:  # the other ranks wait to compare their programs
                agree_on(mesh, f"error: {error}", error)
            raise
        if key not in self._cache:
            key = self._build(call, captured, mesh)
        return self._cache[key].execute(call, captured)

    def __repr__(self) -> str:
        return f"shard({self._fn!r})"

    # --- stages ---

    def trace(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Traced:
        """The step's global graph for these arguments; executes nothing.

        Raises:
            TraceError: The step is not pure, or needs a value to be traced.
            ArgumentError: Arguments that cannot be sharded.
        """
        call, captured = self._bind(args, kwargs)
        return self._traced(call, captured, self._mesh_for(call, captured))

    def lower(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Lowered:
        """The step's program for these arguments; executes nothing."""
        return self.trace(*args, **kwargs).lower()

    def cache_size(self) -> int:
        """The number of programs that are kept."""
        return len(self._cache)

    def trace_count(self) -> int:
        """How often the step has been traced."""
        return self._traces

    def gradient(self) -> "ShardedFunction[..., Any]":
        """The sharded vjp of the step; its first argument are the results' vectors."""
        if self._gradient is None:
            step = self._signature
            roles = (sorted(step.batch), sorted(step.static), ())
            made = _Gradient(pullback(step), self._mesh, *roles, self._schedule)
            made._match = match_gradients
            self._gradient = made
        return self._gradient

    # --- inside ---

    def _bind(self, args: Any, kwargs: Any) -> tuple[Call, Captures]:
        call = self._signature.bind(args, kwargs)
        return call, captures(self._fn, call.opaque())

    def _mesh_for(self, call: Call, captured: Captures) -> DeviceMesh:
        """The mesh of the arguments, which must be the one that was given, if any."""
        found = mesh_of(
            [*call.leaves, *captured.tensors],
            lambda: call.paths() + ["captured"] * len(captured.tensors),
        )
        if found is None and self._mesh is None:
            raise ArgumentError(
                f"{self._signature.name}: all arguments are plain tensors and no mesh "
                "is given. Put the state on one, yf.distribute(params, mesh), or write "
                "@yf.shard(mesh=mesh)."
            )
        if found is not None and self._mesh and not same_mesh(found, self._mesh):
            raise ArgumentError(
                f"the arguments lie on {found}, but {self._signature.name} was "
                f"sharded for {self._mesh}. Distribute them on that mesh, or leave "
                "out mesh=."
            )
        mesh = found if found is not None else self._mesh
        assert mesh is not None
        return mesh

    def _key(self, call: Call, captured: Captures, mesh: DeviceMesh) -> Hashable:
        key = (placed_key(call, mesh), tuple(captured.key))
        return (*key, _floats(call)) if key in self._frozen else key

    def _build(self, call: Call, captured: Captures, mesh: DeviceMesh) -> Hashable:
        """Make the program, and make sure that all ranks have made the same one."""
        failure, compiled = None, None
        try:
            compiled = self._traced(call, captured, mesh).lower().compile()
            graph = compiled.lowered.traced.graph
            text = "\n".join([compiled.plan.as_text(), *constants_of(graph)])
        except Exception as error:
            text, failure = f"error: {error}", error
        agree_on(mesh, text, failure)
        assert compiled is not None
        key = compiled.lowered.traced.key
        self._cache[key] = compiled
        return key

    def _traced(self, call: Call, captured: Captures, mesh: DeviceMesh) -> Traced:
        """Trace, with floats as live inputs if the step allows it."""
        self._traces += 1
        try:
            graph = traced(call, captured, True)
        except Exception:  # torch says in many ways that it needs the number itself
            if not _floats(call):
                raise
            graph = traced(call, captured, False)
            self._frozen.add(self._key(call, captured, mesh))
        key = self._key(call, captured, mesh)
        held = captured.held
        return Traced(
            graph,
            mesh,
            self._schedule,
            call.without_memory(),
            key,
            held,
            self._match,
            self._bind_and_key,
        )

    def _bind_and_key(self, args: Any, kwargs: Any) -> tuple[Call, Captures, Hashable]:
        call, captured = self._bind(args, kwargs)
        key = self._key(call, captured, self._mesh_for(call, captured))
        return call, captured, key


class _Gradient(ShardedFunction[..., Any]):
    """The sharded vjp of a step; gradients of plain tensors are plain."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        grads = super().__call__(*args, **kwargs)
        call = self._signature.bind(args, kwargs)
        return grads if is_differentiated(call) else like_arguments(call, grads)


def traced(call: Call, captured: Captures, live_floats: bool) -> Graph:
    with _inside_trace(), checked_purity(call.signature.fn):
        graph = trace(call, captured, live_floats)
    if not any(isinstance(output.value, Ref) for output in graph.outputs):
        raise ArgumentError(
            f"{call.signature.name} returns no tensor, so there is nothing to compute. "
            "Return its new state and metrics: `return params, opt_state, metrics`."
        )
    return graph


@contextmanager
def _inside_trace() -> Iterator[None]:
    """Sharded functions called from here on are inlined."""
    _tracing.active = True
    try:
        yield
    finally:
        _tracing.active = False


def agree_on(mesh: DeviceMesh, text: str, failure: Exception | None) -> None:
    """Compare what the ranks have made; a rank that failed raises its own error."""
    try:
        world_of(mesh).agree(text)
    except MismatchError:
        if failure is None:
            raise
    if failure is not None:
        raise failure


def constants_of(graph: Graph) -> Iterator[str]:
    """The tensors that a step makes of Python numbers: they could differ by rank."""
    for entry in graph.inputs:
        if entry.role == "constant" and isinstance(entry.source, torch.Tensor):
            yield f"{entry.ref} = {entry.source.tolist()}"


def _floats(call: Call) -> tuple[float, ...]:
    return tuple(leaf for leaf in call.leaves if isinstance(leaf, float))


def _refuse(call: Call, captured: Captures) -> None:
    """Refuse leaves that cannot be read, and captures that a gradient would miss."""
    for number, leaf in enumerate(call.leaves):
        refuse_donated("an argument", leaf)
        if isinstance(leaf, torch.Tensor) and leaf.is_meta:
            raise ArgumentError(
                f"{call.paths()[number]} is on the meta device: it has a shape and no "
                f"data. {call.signature.name}.lower(...) takes it; a call needs data."
            )
    for tensor in captured.tensors:
        if is_functorch_wrapped(tensor) or tensor.grad_fn is not None:
            raise ArgumentError(
                f"{call.signature.name} closes over a tensor of shape "
                f"{tuple(tensor.shape)} that is being differentiated. Pass it as an "
                "argument, so that its gradient can be sharded; or detach it."
            )


# --- the transform --------------------------------------------------------------------


@overload
def shard(
    fn: Callable[Parameters, Returned],
    /,
    *,
    mesh: DeviceMesh | None = None,
    batch_argnums: Names = None,
    batch_argnames: Names = None,
    static_argnums: Names = (),
    static_argnames: Names = (),
    donate_argnums: Names = (),
    donate_argnames: Names = (),
    schedule: Schedule = Schedule(),  # noqa: B008
) -> ShardedFunction[Parameters, Returned]: ...


@overload
def shard(
    fn: None = None,
    /,
    *,
    mesh: DeviceMesh | None = None,
    batch_argnums: Names = None,
    batch_argnames: Names = None,
    static_argnums: Names = (),
    static_argnames: Names = (),
    donate_argnums: Names = (),
    donate_argnames: Names = (),
    schedule: Schedule = Schedule(),  # noqa: B008
) -> Callable[
    [Callable[Parameters, Returned]], ShardedFunction[Parameters, Returned]
]: ...


def shard(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mesh: DeviceMesh | None = None,
    batch_argnums: Names = None,
    batch_argnames: Names = None,
    static_argnums: Names = (),
    static_argnames: Names = (),
    donate_argnums: Names = (),
    donate_argnames: Names = (),
    schedule: Schedule = Schedule(),  # noqa: B008
) -> Any:
    """Turn a pure function of pytrees into the same function on a mesh.

    The function is written for one device and the whole batch. Sharded, it takes and
    returns shards of its state, and its result is the unsharded result on every rank.

    Args:
        fn: The step. Without it, a decorator with the options that are given.
        mesh: Where to run; by default the mesh of the DTensors among the arguments.
        batch_argnums: Positions of the arguments that are split on dimension 0 over the
            mesh. By default the parameter called `batch`, else the last one.
        batch_argnames: The same by name.
        static_argnums: Positions of arguments that are hashed values of the program.
        static_argnames: The same by name.
        donate_argnums: Positions of arguments whose shards the results are written
            into; they may not be used after the call.
        donate_argnames: The same by name.
        schedule: How the step is planned.

    An int, a bool or a string among the arguments is part of the program: pass a step
    counter as `torch.tensor(step)`, or the step is traced again for every value. A
    Python float is a live input.

    Returns:
        A function with the same parameters. Of a DTensor argument the placement is
        kept; a plain tensor is the global value, the same on every rank. Results that
        are sharded are DTensors placed as the argument that they take the place of;
        results that are replicated are plain tensors.

    Raises:
        ArgumentError: At the call: no mesh, two meshes, a batch without a leading
            dimension, an argument or result that is neither a tensor nor static.
        TraceError: At the call: the function reads a value, draws an impure random
            number, or edits an argument.
        DonatedError: At the call: an argument was donated before.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> from torch.func import grad
        >>> @yf.shard
        ... def step(params, batch):
        ...     grads = grad(lambda p: (batch @ p["w"]).square().mean())(params)
        ...     return {"w": params["w"] - 0.1 * grads["w"]}
        >>> mesh = yf.make_mesh(fsdp=4, emulate=True)
        >>> params = yf.distribute({"w": torch.ones(6, 2)}, mesh)
        >>> params = step(params, torch.ones(8, 6))
        >>> yf.full(params)["w"][0]
        tensor([0.4000, 0.4000])
    """
    options = (
        mesh,
        _joined(batch_argnums, batch_argnames),
        _joined(static_argnums, static_argnames),
        _joined(donate_argnums, donate_argnames),
        schedule,
    )
    if fn is None:
        return lambda step: shard_with(step, *options)
    return shard_with(fn, *options)


def shard_with(
    fn: Callable[..., Any],
    mesh: DeviceMesh | None,
    batch: Names,
    static: Names,
    donate: Names,
    schedule: Schedule,
) -> ShardedFunction[..., Any]:
    """`shard` with resolved options; a sharded function keeps those not given."""
    if isinstance(fn, ShardedFunction):
        known = fn._options
        mesh, batch = mesh or known[0], batch or known[1]
        static, donate = static or known[2], donate or known[3]
        schedule = known[4] if schedule == Schedule() else schedule
        if (mesh, batch, static, donate, schedule) == known:
            return fn
        fn = fn._fn
    if not callable(fn):
        raise ArgumentError(
            f"shard takes a function, not a {type(fn).__name__}; options are keywords: "
            "@yf.shard(mesh=mesh)."
        )
    return ShardedFunction(fn, mesh, batch, static, donate, schedule)


def _joined(positions: Names, names: Names) -> Names:
    if positions is None and names is None:
        return None
    both = (positions, names)
    return [
        item
        for which in both
        if which is not None
        for item in ((which,) if isinstance(which, int | str) else which)
    ]
