"""trace: a step becomes a global graph of ATen operators, at unsharded shapes.

Fake tensors carry shapes through the step, so nothing is allocated. A dispatch mode
writes down every operator that arrives below `torch.func` and `functionalize`, with the
user's line that called it. What cannot be part of a pure graph is refused on that line.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import optree
import torch
from torch.func import functionalize
from torch.overrides import TorchFunctionMode

from . import _torch
from ._arguments import Call
from ._capture import Captures
from ._decompose import DECOMPOSITIONS, FUNCTIONS
from ._errors import ArgumentError, TraceError
from ._layout import Meta
from ._scalar import LiveFloat
from ._tree import flatten_with_paths

# --- the graph ------------------------------------------------------------------------


@dataclass(frozen=True)
class Ref:
    """A value of the graph, by its number."""

    id: int

    def __str__(self) -> str:
        return f"%{self.id}"

    __repr__ = __str__


@dataclass(frozen=True)
class Node:
    """One operator: arguments with `Ref`s in place of tensors, and its results."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Ref | None, ...]
    line: str


@dataclass(frozen=True)
class Input:
    """A value that exists before the step: an argument's leaf or a captured tensor.

    `source` finds it at a call: the index of an argument's leaf, the index of a
    captured tensor in the walk of `captures`, or the tensor itself.
    """

    ref: Ref
    path: str
    role: str  # "state", "batch", "captured" or "constant"
    source: int | torch.Tensor
    example: Any


@dataclass(frozen=True)
class Output:
    """A leaf of the result: a value of the graph, or a static value."""

    path: str
    value: Any  # Ref or static
    is_float: bool = False


@dataclass(frozen=True)
class Graph:
    """A traced step: what `trace` hands to `place`."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    metas: Mapping[int, Meta]
    spec: optree.PyTreeSpec

    def as_text(self) -> str:
        """One line for each input, operator and output, at global shapes."""
        lines = [f"{i.ref}: {self.metas[i.ref.id]} = {i.path}" for i in self.inputs]
        lines += [self._line(node) for node in self.nodes]
        lines += [f"{o.path} = {o.value}" for o in self.outputs]
        return "\n".join(lines)

    def _line(self, node: Node) -> str:
        outs = ", ".join(f"{r}: {self.metas[r.id]}" for r in node.outputs if r)
        args = ", ".join(map(str, node.args))
        return f"{outs} = {node.op}({args})    # {node.line}"


def refs(arguments: Any) -> Iterator[Ref]:
    """All references in (nested) arguments, in order."""
    if isinstance(arguments, Ref):
        yield arguments
    elif isinstance(arguments, Mapping):
        yield from refs(tuple(arguments.values()))
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from refs(argument)


def map_leaves(fn: Callable[[Any], Any], arguments: Any) -> Any:
    """Apply `fn` to all leaves of (nested) operator arguments."""
    if isinstance(arguments, Mapping):
        return {k: map_leaves(fn, v) for k, v in arguments.items()}
    if isinstance(arguments, tuple | list) and not isinstance(arguments, torch.Size):
        return type(arguments)([map_leaves(fn, a) for a in arguments])
    return fn(arguments)


def results(out: Any) -> list[Any]:
    """An operator's results in one list, `None` for what is no tensor."""
    if isinstance(out, tuple | list):
        return [leaf for part in out for leaf in results(part)]
    return [out if isinstance(out, torch.Tensor) else None]


# --- recording ------------------------------------------------------------------------


@dataclass
class _Recorder(_torch.TorchDispatchMode):
    """Writes down the operators that reach it."""

    fakes: _torch.FakeTensorMode
    captured: Captures
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    metas: dict[int, Meta] = field(default_factory=dict)
    refs: dict[int, Ref] = field(default_factory=dict)  # by id() of the fake
    alive: list[Any] = field(default_factory=list)  # so that an id() is not given twice
    storages: Counter[int] = field(default_factory=Counter)  # values on each storage
    swaps: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about a tensor, such as its device
            return func(*args, **kwargs)
        rule = DECOMPOSITIONS.get(func)
        with self:
            out = rule(*args, **kwargs) if rule else NotImplemented
            if out is NotImplemented and _torch.is_composite(func):
                out = func.decompose(*args, **kwargs)
        return self._record(func, args, kwargs) if out is NotImplemented else out

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        line = user_line(sys._getframe(2))
        if func in (torch.ops.aten.lift_fresh.default, _LIFT_COPY):
            return self._constant(func, args[0])
        if func in _ALIASES:
            return self._alias(func, args[0])
        _refuse_random(func, args, kwargs, line)
        if _torch.schema(func).is_mutable:
            return self._edit(func, args, kwargs, line)
        args, kwargs = map_leaves(self._swap, (tuple(args), kwargs))
        out = func(*args, **kwargs)
        made = tuple(self._number(leaf) for leaf in results(out))
        args, kwargs = map_leaves(self.reference, (args, kwargs))
        self.nodes.append(Node(func, args, kwargs, made, line))
        return out

    def _alias(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        fake = self._swap(tensor)
        out = func(fake)
        self.refs[id(out)] = self.refs[id(fake)]
        self.alive.append(out)
        return out

    def _number(self, tensor: torch.Tensor | None) -> Ref | None:
        if tensor is None:
            return None
        ref = Ref(len(self.metas))
        self.metas[ref.id] = Meta.of(tensor)
        self.refs[id(tensor)] = ref
        self.storages[_torch.storage_id(tensor)] += 1
        self.alive.append(tensor)
        return ref

    def reference(self, leaf: Any) -> Any:
        """The `Ref` of a fake tensor; anything else as it is."""
        return self.refs[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf

    def _swap(self, leaf: Any) -> Any:
        """Put a fake in the place of a real tensor: an input that is captured."""
        if not isinstance(leaf, torch.Tensor) or id(leaf) in self.refs:
            return leaf
        if id(leaf) not in self.swaps:
            self.swaps[id(leaf)] = self._capture(leaf)
            self.alive.append(leaf)
        return self.swaps[id(leaf)]

    def _capture(self, real: torch.Tensor) -> torch.Tensor:
        position = self.captured.index(real)
        source = real if position is None else position
        name = f"captured[{len(self.swaps)}]"
        return self.add_input(name, "captured", source, real)

    def _constant(self, func: Any, real: torch.Tensor) -> torch.Tensor:
        """A tensor made of Python numbers inside of the step."""
        if id(real) in self.refs:
            return real
        fake = func(real)
        ref = self._number(fake)
        assert ref is not None
        self.inputs.append(Input(ref, "constant", "constant", real, real))
        return fake

    def add_input(
        self, path: str, role: str, source: int | torch.Tensor, example: Any
    ) -> torch.Tensor:
        """A fake tensor with the global shape of `example`, as an input."""
        meta = _meta_of(example)
        with self.fakes:
            fake = torch.empty_strided(
                meta.shape, meta.stride, dtype=meta.dtype, device=meta.device
            )
        ref = self._number(fake)
        assert ref is not None
        self.inputs.append(Input(ref, path, role, source, example))
        return fake

    def _edit(self, func: Any, args: Any, kwargs: Any, line: str) -> torch.Tensor:
        """An edit of an input is refused; of a temporary it makes a new value.

        `functionalize` leaves edits only inside of operators that torch composes of
        others, on temporaries of theirs.
        """
        edited = args[0]
        ref = self.refs.get(id(edited))
        path = next((i.path for i in self.inputs if i.ref == ref), "a captured tensor")
        plain = _torch.without_edit(func)
        if ref is None or path != "a captured tensor" or plain is None:
            raise _Edit(path, line)
        if self.storages[_torch.storage_id(edited)] > 1:
            raise _Edit("a view of a temporary", line)
        with self:
            made = plain(*args, **kwargs)
        self.refs[id(edited)] = self.refs[id(made)]
        self.alive.append(made)
        return edited


class _Edit(Exception):
    """An operator would write to an input."""


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_LIFT_COPY = torch.ops.aten.lift_fresh_copy.default


def _meta_of(example: Any) -> Meta:
    if isinstance(example, torch.Tensor):
        return Meta.of(example)
    return Meta((), torch.float64, ())


def _refuse_random(func: Any, args: Any, kwargs: Any, line: str) -> None:
    """Refuse operators that draw from a global generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return
    names = [a.name for a in _torch.schema(func).arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if "dropout_p" in names and not given.get("dropout_p"):
        return
    raise TraceError(
        f"{line}: {func} draws random numbers from a global generator, so the step is "
        "no pure function of its arguments. Draw them outside of the step and pass "
        "them in, or switch the layer off (dropout with rate 0 or training=False)."
    )


class _Functions(TorchFunctionMode):
    """Replaces the few torch functions that would read a value when traced."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return FUNCTIONS.get(func, func)(*args, **(kwargs or {}))


# --- the user's line ------------------------------------------------------------------

_SKIPPED = tuple(
    os.path.dirname(module.__file__ or "") + os.sep
    for module in (torch, optree, sys.modules[__package__])
) + tuple(f"{os.sep}{name}{os.sep}" for name in ("einops", "jaxtyping"))


def user_line(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame that is the user's own code."""
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _is_users(filename: str) -> bool:
    if filename.startswith("<frozen") or filename == "<string>":
        return False
    return not any(part in filename for part in _SKIPPED) and not filename.endswith(
        (f"{os.sep}contextlib.py", f"{os.sep}functools.py")
    )


def _line_of(trace: TracebackType | None) -> str:
    line = "?"
    while trace is not None:
        if _is_users(trace.tb_frame.f_code.co_filename):
            line = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


# --- the stage ------------------------------------------------------------------------


def trace(call: Call, captured: Captures, live_floats: bool = True) -> Graph:
    """Trace a step at the shapes of one call.

    Args:
        call: The step and its arguments; only shapes, dtypes and strides are used.
        captured: What the step reads besides its arguments.
        live_floats: Whether Python floats are inputs; else they are constants.

    Returns:
        The global graph.

    Raises:
        TraceError: The step reads a value, draws an impure random number, makes a
            shape that depends on values, or edits an argument in place.
        ArgumentError: An output is neither a tensor nor a static value.
        ValueRead: The step needs the value of a float that is live.
    """
    recorder = _Recorder(_torch.FakeTensorMode(allow_non_fake_inputs=True), captured)
    leaves = [_as_input(recorder, *leaf) for leaf in _leaves(call, live_floats)]
    outputs, spec = _execute(recorder, call, leaves)
    nodes = _live_nodes(recorder.nodes, outputs)
    used = {ref.id for node in nodes for ref in refs((node.args, node.kwargs))}
    used |= {ref.id for output in outputs for ref in refs(output.value)}
    kept = (i for i in recorder.inputs if i.role in _KEPT or i.ref.id in used)
    return Graph(tuple(kept), nodes, outputs, recorder.metas, spec)


_KEPT = ("state", "batch")


def _leaves(call: Call, live_floats: bool) -> list[tuple[int, str, str, Any, bool]]:
    batch = call.signature.batch
    rows = zip(call.paths(), call.owners(), call.leaves, strict=True)
    return [
        (n, path, "batch" if owner in batch else "state", leaf, live_floats)
        for n, (path, owner, leaf) in enumerate(rows)
    ]


def _as_input(
    recorder: _Recorder, index: int, path: str, role: str, leaf: Any, live: bool
) -> Any:
    if isinstance(leaf, torch.Tensor):
        return recorder.add_input(path, role, index, leaf)
    if isinstance(leaf, float) and live:
        return LiveFloat(recorder.add_input(path, "state", index, leaf))
    return leaf


def _execute(
    recorder: _Recorder, call: Call, leaves: list[Any]
) -> tuple[tuple[Output, ...], optree.PyTreeSpec]:
    try:
        with recorder.fakes, recorder, _Functions(), _torch.compiling():
            return _run_functional(recorder, call, leaves)
    except _Edit as edit:
        raise _edit_error(call, leaves, recorder, edit) from None
    except _torch.DataDependentOutputException as error:
        raise TraceError(_READ.format(line=_line_of(error.__traceback__))) from error
    except _torch.DynamicOutputShapeException as error:
        line = _line_of(error.__traceback__)
        raise TraceError(_DYNAMIC.format(line=line, op=error.func)) from error
    except RuntimeError as error:
        if "mutating a non-functional tensor" not in str(error):
            raise
        edit = _Edit("a captured tensor", _line_of(error.__traceback__))
        raise _edit_error(call, leaves, recorder, edit) from None


_READ = (
    "{line}: the step reads the value of a tensor (.item(), float(), bool(), `if`), "
    "which is not known while the step is traced. Use torch.where for a choice "
    "between values, or return the tensor as a metric and read it outside."
)
_DYNAMIC = (
    "{line}: the shape of the result of {op} depends on values (a Boolean mask or "
    "nonzero). Keep the shape and use torch.where(mask, x, 0), or multiply by the mask."
)


def _run_functional(
    recorder: _Recorder, call: Call, leaves: list[Any]
) -> tuple[tuple[Output, ...], optree.PyTreeSpec]:
    """Run the step under `functionalize`; only tensors may pass through it."""
    fakes = [x.tensor if isinstance(x, LiveFloat) else x for x in leaves]
    positions = [n for n, x in enumerate(fakes) if isinstance(x, torch.Tensor)]
    found: dict[str, Any] = {}

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        inner = list(leaves)
        for n, tensor in zip(positions, tensors, strict=True):
            live = isinstance(leaves[n], LiveFloat)
            inner[n] = LiveFloat(tensor) if live else tensor
        result = call.apply(inner)
        found["paths"], values, found["spec"] = flatten_with_paths(result, "output")
        found["values"] = [_checked(p, v) for p, v in zip(found["paths"], values)]
        return [_tensor(v) for v in values if _tensor(v) is not None]

    tensors = iter(functionalize(flat)(*(fakes[n] for n in positions)))
    outputs = [
        Output(path, _reference(recorder, next(tensors)), isinstance(value, LiveFloat))
        if _tensor(value) is not None
        else Output(path, value)
        for path, value in zip(found["paths"], found["values"], strict=True)
    ]
    return tuple(outputs), found["spec"]


def _reference(recorder: _Recorder, tensor: torch.Tensor) -> Ref:
    return recorder.reference(recorder._swap(tensor))


def _tensor(value: Any) -> Any:
    if isinstance(value, LiveFloat):
        return value.tensor
    return value if isinstance(value, torch.Tensor) else None


def _checked(path: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor | LiveFloat | bool | int | float | str):
        return value
    raise ArgumentError(
        f"{path} is a {type(value).__qualname__}; a step returns trees of tensors, "
        "Python scalars and strings. Return torch.as_tensor(...) of it, or register "
        "its class as a node with optree."
    )


def _live_nodes(nodes: list[Node], outputs: tuple[Output, ...]) -> tuple[Node, ...]:
    """Drop the operators that no output needs."""
    needed = {ref.id for output in outputs for ref in refs(output.value)}
    kept = []
    for node in reversed(nodes):
        if any(ref and ref.id in needed for ref in node.outputs):
            needed.update(ref.id for ref in refs((node.args, node.kwargs)))
            kept.append(node)
    return tuple(reversed(kept))


# --- edits ----------------------------------------------------------------------------


def _edit_error(
    call: Call, leaves: list[Any], recorder: _Recorder, edit: _Edit
) -> TraceError:
    """`functionalize` tells of an edit at its end: run once more to find the line."""
    path, line = edit.args
    finder = _EditFinder({_storage(x): p for x, p in zip(leaves, call.paths())})
    try:
        with recorder.fakes, finder, _torch.compiling():
            call.apply(leaves)
    except _Edit as found:
        path, line = found.args
    except Exception:  # the step fails in another way without functionalize
        pass
    return TraceError(
        f"{line}: the step edits {path} in place, so it is no pure function. Write the "
        "result to a new value (x = x + y, not x += y), or clone the argument first."
    )


def _storage(leaf: Any) -> Any:
    tensor = _tensor(leaf)
    return None if tensor is None else _torch.storage_id(tensor)


class _EditFinder(_torch.TorchDispatchMode):
    """Stops at the first operator that writes to the storage of an argument."""

    def __init__(self, paths: dict[Any, str]) -> None:
        super().__init__()
        self.paths = paths

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _torch.schema(func).is_mutable and args:
            path = self.paths.get(_torch.storage_id(args[0]))
            if path is not None:
                raise _Edit(path, user_line(sys._getframe(1)))
        return func(*args, **(kwargs or {}))
