"""What a step reads besides its arguments, looked up anew at every call.

A function sees its closure, the globals that its code names, its defaults, and what
hangs below those objects. `captures` walks all of it: tensors become hidden inputs of
the program, everything else a part of the call's key, so that a captured value that
has changed is never used stale.

Code of installed packages is taken to be constant; objects of their classes are not.
"""

import argparse
import collections
import functools
import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONSTANT = {"torch", "builtins", "yafsdp_fn"} | set(sys.stdlib_module_names)
_PACKAGES = tuple(
    {sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib", "stdlib")}
)
_OPEN = (torch.nn.Module, types.SimpleNamespace, argparse.Namespace)


@dataclass
class Captures:
    """`key` changes when a captured value does; `tensors` in the order of the walk."""

    key: list[Hashable] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)  # what `key` knows by its id


def captures(fn: Callable[..., Any], arguments: Iterable[Any] = ()) -> Captures:
    """Walk everything that `fn` can reach without being passed it as a tensor.

    Args:
        fn: Any callable of the user's.
        arguments: Static arguments, which may hold or close over tensors as well.

    Returns:
        The key and the tensors, in an order that depends on the program text alone.
    """
    # What has been seen is kept alive, so that no later object is given its id.
    found, seen, stack = Captures(), dict[int, tuple[int, Any]](), [fn, *arguments]
    while stack:
        value = stack.pop()
        if isinstance(value, SCALARS):
            found.key.append((type(value).__name__, repr(value)))
        elif id(value) in seen:
            found.key.append(seen[id(value)][0])
        else:
            seen[id(value)] = (len(seen), value)
            stack.extend(_visit(value, found))
    return found


def frozen(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its closure as it is now, for a call that comes later.

    A loop that makes functions rebinds the variable that they all close over.
    """
    return _frozen(fn, {})


def _frozen(value: Any, made: dict[int, Any]) -> Any:
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        inner, args, keywords = (_frozen(part, made) for part in parts)
        return functools.partial(inner, *args, **keywords)
    if type(value) is dict:
        return {key: _frozen(part, made) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_frozen(part, made) for part in value)
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    if id(value) not in made:
        cells = tuple(types.CellType() for _ in value.__closure__)
        copy = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
        )
        copy.__kwdefaults__, copy.__dict__ = value.__kwdefaults__, value.__dict__
        made[id(value)] = copy
        for cell, old in zip(cells, value.__closure__, strict=True):
            cell.cell_contents = _frozen(_cell(old), made)
    return made[id(value)]


def _visit(value: Any, found: Captures) -> Iterator[Any]:
    """Record one object and yield what it refers to."""
    if isinstance(value, torch.Tensor):
        found.tensors.append(value)
        found.key.append(_tensor_key(value))
    elif isinstance(value, np.ndarray):
        digest = hashlib.blake2b(value.tobytes()).digest()
        found.key.append((value.shape, value.dtype.str, digest))
    elif isinstance(value, types.FunctionType):
        found.key.append(value.__code__)
        yield from _of_function(value)
    elif isinstance(value, dict | list | tuple | set | frozenset | collections.deque):
        found.key.append((type(value).__qualname__, len(value)))
        yield from _of_container(value)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    else:
        yield from _of_object(value, found)


def _tensor_key(tensor: torch.Tensor) -> Hashable:
    key = (tensor.shape, tensor.dtype, tensor.stride(), tensor.device)
    if isinstance(tensor, DTensor):
        return (*key, tensor.placements, tensor.device_mesh)
    return key


def _of_container(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else value


def _of_function(fn: types.FunctionType) -> Iterator[Any]:
    """Closure, defaults, and the globals that the code names."""
    yield getattr(fn, "__wrapped__", None)
    if (fn.__module__ or "").partition(".")[0] == "torch":
        return
    yield from (_cell(cell) for cell in fn.__closure__ or ())
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()
    if not _is_installed(fn.__module__ or ""):
        yield from _named(vars_of=fn.__globals__, names=_names(fn.__code__))


def _named(vars_of: dict[str, Any], names: tuple[str, ...], depth: int = 3) -> Any:
    """The values that code names in a scope and in the modules of that scope.

    `package.module.rate` is looked up through all of its modules.
    """
    for name in dict.fromkeys(names):
        value = vars_of.get(name)
        if not isinstance(value, types.ModuleType):
            yield value
        elif depth and not _is_installed(value.__name__):
            yield from _named(vars(value), names, depth - 1)


def _of_object(value: Any, found: Captures) -> Iterator[Any]:
    """Known by class and attributes if it is a user's, else by its identity."""
    if isinstance(value, type) and not _is_installed(value.__module__):
        found.key.append(value.__qualname__)
        yield from (v for k, v in vars(value).items() if k not in _UNREAD)
        yield from value.__bases__
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif _is_open(value):
        yield type(value)
        yield _attributes(value)
    elif hasattr(value, "__wrapped__"):
        yield value.__wrapped__
    else:
        found.key.append(id(value))
        found.held.append(value)


_UNREAD = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__annotations__",
    "__abstractmethods__",
}


# Recurrent modules keep the parameters of their last call beside their own.
_DERIVED = {"_flat_weights", "_flat_weight_refs"}


def _is_open(value: Any) -> bool:
    """Whether an object is known by its class and attributes, not by its identity."""
    if isinstance(value, type | types.ModuleType):
        return False
    return isinstance(value, _OPEN) or not _is_installed(type(value).__module__)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots included."""
    slots = [
        name
        for kind in type(value).__mro__
        for name in _listed(vars(kind).get("__slots__", ()))
        if hasattr(value, name)
    ]
    own = {
        name: attribute
        for name, attribute in getattr(value, "__dict__", {}).items()
        if name not in _DERIVED
    }
    return {name: getattr(value, name) for name in slots} | own


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


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Whether a module is code of an installed package, which does not change."""
    root = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return root != "__main__" and (root in _CONSTANT or file.startswith(_PACKAGES))
