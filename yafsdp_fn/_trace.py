"""trace: a step becomes a global graph of ATen operators, at unsharded shapes.

Fake tensors carry shapes through the step, so nothing is allocated. A dispatch mode
writes down every operator that arrives below `torch.func` and functionalisation, with
the user's line that called it. What cannot be part of a pure graph is refused on that
line.
"""

from typing import Any

import optree
import torch

from . import _torch
from ._arguments import Call
from ._capture import Captures
from ._errors import ArgumentError, TraceError
from ._functions import READ
from ._graph import Graph, Output, Ref, live_nodes, read_by
from ._lines import line_of
from ._record import CallFinder, EditError, EditFinder, Functions, Recorder
from ._rewrite import rewrite
from ._scalar import LiveFloat
from ._swap import Swap
from ._tree import flatten_with_paths


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
        ValueReadError: The step needs the value of a float that is live.
    """
    recorder = Recorder(_torch.FakeTensorMode(allow_non_fake_inputs=True), captured)
    leaves = [_as_input(recorder, *leaf) for leaf in _leaves(call, live_floats)]
    outputs, spec = _execute(recorder, call, leaves)
    nodes = live_nodes(recorder.nodes, outputs)
    used = read_by(nodes, outputs)
    kept = (i for i in recorder.inputs if i.role in _KEPT or i.ref.id in used)
    return rewrite(Graph(tuple(kept), nodes, outputs, recorder.metas, spec))


_KEPT = ("state", "batch")


def _leaves(call: Call, live_floats: bool) -> list[tuple[int, str, str, Any, bool]]:
    batch = call.signature.batch
    rows = zip(call.paths(), call.owners(), call.leaves, strict=True)
    return [
        (n, path, "batch" if owner in batch else "state", leaf, live_floats)
        for n, (path, owner, leaf) in enumerate(rows)
    ]


def _as_input(
    recorder: Recorder, index: int, path: str, role: str, leaf: Any, live: bool
) -> Any:
    if isinstance(leaf, torch.Tensor):
        return recorder.add_input(path, role, index, leaf)
    if isinstance(leaf, float) and live:
        return LiveFloat(recorder.add_input(path, "state", index, leaf))
    return leaf


def _execute(
    recorder: Recorder, call: Call, leaves: list[Any]
) -> tuple[tuple[Output, ...], optree.PyTreeSpec]:
    try:
        with (
            # As inside of torch.func, whatever the caller has switched off.
            torch.inference_mode(False),
            torch.enable_grad(),
            recorder.fakes,
            recorder,
            Functions(),
            _torch.compiling(),
            _torch.unfolded_linearize(),
        ):
            return _run_functional(recorder, call, leaves)
    except TraceError as error:
        raise error from None
    except EditError as edit:
        raise _edit_error(call, leaves, recorder, edit) from None
    except _torch.DataDependentOutputException as error:
        raise TraceError(READ.format(line=line_of(error.__traceback__))) from None
    except _torch.DynamicOutputShapeException as error:
        line = line_of(error.__traceback__)
        raise TraceError(_DYNAMIC.format(line=line, op=error.func)) from None
    except (RecursionError, NotImplementedError) as error:
        if isinstance(error, NotImplementedError) and "HigherOrder" not in str(error):
            raise
        line = line_of(error.__traceback__)
        raise TraceError(_CONTROL.format(line=line)) from None
    except RuntimeError as error:
        if "does not have a grad_fn" in str(error):
            line = line_of(error.__traceback__)
            raise TraceError(_BACKWARD.format(line=line)) from None
        if not any(text in str(error) for text in _EDITS_CAPTURED):
            error.add_note(f"in the step: {line_of(error.__traceback__)}")
            raise
        captured = EditError("a captured tensor", line_of(error.__traceback__))
        raise _edit_error(call, leaves, recorder, captured) from None


# What functionalisation and torch.func say when a captured tensor is edited.
_EDITS_CAPTURED = ("mutating a non-functional tensor", "mutate a captured Tensor")
_BACKWARD = (
    "{line}: a step is a pure function, in which there is no backward(). Write "
    "grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)."
)
_CONTROL = (
    "{line}: a control-flow operator (cond, while_loop, scan, flex_attention) cannot "
    "be traced. Use torch.where for a choice between values, a Python loop for steps."
)
_DYNAMIC = (
    "{line}: the shape of the result of {op} depends on values (a Boolean mask or "
    "nonzero). Keep the shape and use torch.where(mask, x, 0), or multiply by the mask."
)


def _run_functional(
    recorder: Recorder, call: Call, leaves: list[Any]
) -> tuple[tuple[Output, ...], optree.PyTreeSpec]:
    """Run the step so that edits become new values; see what it edits of its inputs."""
    positions = [n for n, x in enumerate(leaves) if _tensor(x) is not None]
    captured = recorder.captured.tensors
    found: dict[str, Any] = {}

    def flat(fakes: list[torch.Tensor], hidden: list[torch.Tensor]) -> list[Any]:
        inner = list(leaves)
        for n, tensor in zip(positions, fakes, strict=True):
            live = isinstance(leaves[n], LiveFloat)
            inner[n] = LiveFloat(tensor) if live else tensor
        with Swap(dict(zip(map(id, captured), hidden, strict=True))):
            result = call.apply(inner)
        found["paths"], values, found["spec"] = flatten_with_paths(result, "output")
        found["values"] = [
            _checked(p, v) for p, v in zip(found["paths"], values, strict=True)
        ]
        return [_tensor(v) for v in values if _tensor(v) is not None]

    given = [_tensor(leaves[n]) for n in positions]
    hidden = recorder.add_captured()
    made, edited = _torch.functional_call(
        lambda fakes: flat(fakes[: len(given)], fakes[len(given) :]), [*given, *hidden]
    )
    if edited is not None:
        raise EditError(recorder.path_of(([*given, *hidden])[edited]), "?")
    tensors = iter(made)
    outputs = [
        Output(path, _reference(recorder, next(tensors)), isinstance(value, LiveFloat))
        if _tensor(value) is not None
        else Output(path, value)
        for path, value in zip(found["paths"], found["values"], strict=True)
    ]
    return tuple(outputs), found["spec"]


def _reference(recorder: Recorder, tensor: torch.Tensor) -> Ref:
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


# --- edits ----------------------------------------------------------------------------


def _edit_error(
    call: Call, leaves: list[Any], recorder: Recorder, edit: EditError
) -> TraceError:
    """Functionalisation tells of an edit at its end: run again to find the line."""
    path, line = edit.args
    rows = zip(leaves, call.paths(), strict=True)
    paths = {_storage(x): path for x, path in rows if _tensor(x) is not None}
    finders = EditFinder(paths), CallFinder(paths)
    try:
        with recorder.fakes, finders[0], finders[1], _torch.compiling():
            call.apply(leaves)
    except EditError as found:
        path, line = found.args
    except Exception:  # the step fails in another way without it
        pass
    return TraceError(
        f"{line}: the step edits {path} in place, so it is no pure function. Write the "
        "result to a new value (x = x + y, not x += y), or clone the argument first."
    )


def _storage(leaf: Any) -> Any:
    tensor = _tensor(leaf)
    return None if tensor is None else _torch.storage_id(tensor)
