"""Writing down the operators of a step while it runs on fake tensors."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import _torch
from ._capture import Captures
from ._decompose import DECOMPOSITIONS
from ._errors import TraceError
from ._functions import FUNCTIONS
from ._graph import Input, Node, Ref, map_leaves, results
from ._layout import Meta
from ._lines import user_line

# --- recording ------------------------------------------------------------------------


@dataclass
class Recorder(_torch.TracerMode):
    """Writes down the operators that reach it."""

    fakes: _torch.FakeTensorMode
    captured: Captures
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    metas: dict[int, Meta] = field(default_factory=dict)
    refs: dict[int, Ref] = field(default_factory=dict)  # by id() of the fake
    alive: list[Any] = field(default_factory=list)  # so that an id() is not given twice
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
        self._refuse_edit(func, args, kwargs, line)
        args, kwargs = map_leaves(self._swap, (tuple(args), kwargs))
        out = _SHAPES.get(func, func)(*args, **kwargs)
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

    def path_of(self, tensor: torch.Tensor) -> str:
        """The path of an input."""
        ref = self.refs[id(tensor)]
        return next(entry.path for entry in self.inputs if entry.ref == ref)

    def _capture(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor that the walk over closures did not meet: kept as it is."""
        return self.add_input(_CAPTURED, "captured", real, real)

    def add_captured(self) -> list[torch.Tensor]:
        """Fakes for all captured tensors that are known before the step runs."""
        for position, real in enumerate(self.captured.tensors):
            fake = self.add_input(_CAPTURED, "captured", position, real)
            self.swaps[id(real)] = fake
        return [self.swaps[id(real)] for real in self.captured.tensors]

    def _constant(self, func: Any, real: torch.Tensor) -> torch.Tensor:
        """A tensor made of Python numbers inside of the step."""
        if id(real) in self.refs:
            return real
        fake = func(real)
        ref = self._number(fake)
        assert ref is not None
        self.inputs.append(Input(ref, "constant", "constant", real, None))
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
        self.inputs.append(
            Input(ref, path, role, source, _torch.without_memory(example))
        )
        return fake

    def _refuse_edit(self, func: Any, args: Any, kwargs: Any, line: str) -> None:
        """Functionalisation leaves edits only of what it has not wrapped."""
        if _torch.written(func, args, kwargs):
            raise EditError(_CAPTURED, line)


_CAPTURED = "a captured tensor"


class EditError(Exception):
    """An operator would write to an input."""


def _like_lists(*lists: Any, **_: Any) -> tuple[list[torch.Tensor], ...]:
    """The results of a fused optimiser: parameters, gradients and moments."""
    return tuple([torch.empty_like(t) for t in tensors] for tensors in lists[:5])


# Operators whose shapes torch finds by running them on real memory.
_SHAPES: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (
        torch.ops.aten._fused_adamw.default,
        torch.ops.aten._fused_adamw.tensor_lr,
        torch.ops.aten._fused_adam.default,
        torch.ops.aten._fused_adam.tensor_lr,
    ),
    _like_lists,
)
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_LIFT_COPY = torch.ops.aten.lift_fresh_copy.default


def _meta_of(example: Any) -> Meta:
    """A description; a tensor without data stands for one on the default device."""
    if not isinstance(example, torch.Tensor):
        return Meta((), torch.float64, ())
    meta = Meta.of(example)
    return replace(meta, device=torch.get_default_device()) if example.is_meta else meta


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
        "no pure function of its arguments. Draw them from a key (yf.random.normal, "
        "yf.random.dropout), or switch the layer off (rate 0, or training=False)."
    )


class Functions(TorchFunctionMode):
    """Replaces the few torch functions that would read a value when traced."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return FUNCTIONS.get(func, func)(*args, **(kwargs or {}))


class EditFinder(_torch.TorchDispatchMode):
    """Stops at the first operator that writes to the storage of an argument."""

    def __init__(self, paths: Mapping[Any, str]) -> None:
        super().__init__()
        self.paths = paths

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for tensor in _torch.written(func, args, kwargs or {}):
            _refuse_edit(tensor, self.paths, sys._getframe(1))
        return func(*args, **(kwargs or {}))


class CallFinder(TorchFunctionMode):
    """The same for calls that torch.func refuses before they are dispatched."""

    def __init__(self, paths: Mapping[Any, str]) -> None:
        super().__init__()
        self.paths = paths

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        edits = name in _EDITING or (name.endswith("_") and not name.endswith("__"))
        if edits and args and isinstance(args[0], _torch.FakeTensor):
            _refuse_edit(args[0], self.paths, sys._getframe(1))
        return func(*args, **(kwargs or {}))


_EDITING = {"__setitem__"} | {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow")
}


def _refuse_edit(
    tensor: torch.Tensor, paths: Mapping[Any, str], frame: FrameType
) -> None:
    """Stop at the edit of an argument, and before that of a real, captured tensor."""
    captured = not isinstance(tensor, _torch.FakeTensor)
    path = _CAPTURED if captured else paths.get(_torch.storage_id(tensor))
    if path is not None:
        raise EditError(path, user_line(frame))
