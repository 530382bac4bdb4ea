"""What a step reads besides its arguments, looked up anew at every call.

A function sees its closure, the globals that its code names, its defaults, and what
hangs below those objects. `captures` walks all of it: tensors become hidden inputs of
the program, everything else a part of the call's key, so that a captured value that
has changed is never used stale.
"""

import argparse
import collections
import functools
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_FOREIGN = {"torch", "builtins", "optree", "einops", "numpy", "jaxtyping"}
_FOREIGN |= set(sys.stdlib_module_names) - {"__main__"}


@dataclass
class Captures:
    """`key` changes when a captured value does; `tensors` in the order of the walk."""

    key: list[Hashable] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)  # keeps the ids in `key` unique

    def index(self, tensor: torch.Tensor) -> int | None:
        """The place of a tensor in the walk, or None if the walk did not meet it."""
        for position, found in enumerate(self.tensors):
            if found is tensor:
                return position
        return None


def captures(fn: Callable[..., Any]) -> Captures:
    """Walk everything that `fn` can reach without being passed it.

    Args:
        fn: Any callable of the user's.

    Returns:
        The key and the tensors, in an order that depends on the program text alone.
    """
    found, seen, stack = Captures(), set[int](), [fn]
    while stack:
        value = stack.pop()
        if isinstance(value, _SCALARS):
            found.key.append((type(value).__name__, repr(value)))
        elif id(value) not in seen:
            seen.add(id(value))
            stack.extend(_visit(value, found))
    return found


def _visit(value: Any, found: Captures) -> Iterator[Any]:
    """Record one object and yield what it refers to."""
    if isinstance(value, torch.Tensor):
        found.tensors.append(value)
        found.key.append((value.shape, value.dtype, value.stride()))
    elif isinstance(value, types.FunctionType):
        found.key.append(value.__code__)
        yield from _of_function(value)
    elif isinstance(value, dict):
        yield from (part for pair in value.items() for part in pair)
    elif isinstance(value, list | tuple | collections.deque):
        yield from value
    elif isinstance(value, set | frozenset):
        yield from sorted(value, key=repr)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif _is_open(value):
        found.key.append(type(value).__qualname__)
        yield _attributes(value)
        yield inspect.getattr_static(type(value), "__call__", None)
    elif hasattr(value, "__wrapped__"):
        yield value.__wrapped__
    else:
        found.key.append(id(value))
        found.held.append(value)


def _of_function(fn: types.FunctionType) -> Iterator[Any]:
    if _is_foreign(fn.__module__):
        return
    yield from (_cell(cell) for cell in fn.__closure__ or ())
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()
    for name in _names(fn.__code__):
        value = fn.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            yield from _of_module(value, fn.__code__)
        elif name in fn.__globals__:
            yield value
    yield getattr(fn, "__wrapped__", None)


def _of_module(module: types.ModuleType, code: types.CodeType) -> Iterator[Any]:
    """Attributes of a user's module that the code names (`config.rate`)."""
    if not _is_foreign(module.__name__):
        for name in _names(code):
            value = vars(module).get(name)
            if name in vars(module) and not isinstance(value, types.ModuleType):
                yield value


def _is_open(value: Any) -> bool:
    """Whether an object is known by its class and attributes, not by its identity."""
    if isinstance(value, type | types.ModuleType):
        return False
    if isinstance(value, torch.nn.Module | types.SimpleNamespace | argparse.Namespace):
        return True
    kind = type(value).__module__
    return not (_is_foreign(kind) or kind.partition(".")[0] == "yafsdp_fn")


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots included."""
    slots = [
        name
        for kind in type(value).__mro__
        for name in _listed(vars(kind).get("__slots__", ()))
        if hasattr(value, name)
    ]
    return {name: getattr(value, name) for name in slots} | getattr(
        value, "__dict__", {}
    )


def _listed(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _names(code: types.CodeType) -> tuple[str, ...]:
    """Global names and attributes that the code and the functions inside it use."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return code.co_names + tuple(name for c in inner for name in _names(c))


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return None


def _is_foreign(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _FOREIGN
