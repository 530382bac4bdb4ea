"""What a call passes in: bound to names, flattened, classified, and keyed."""

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch

from ._capture import SCALARS
from ._errors import ArgumentError
from ._torch import without_memory
from ._tree import flatten, flatten_with_paths, unflatten

Names = int | str | Iterable[int | str] | None


@dataclass(frozen=True)
class Signature:
    """The parameters of a step and what each is for.

    `batch` arguments are split over the mesh, `static` ones are part of the program,
    `donate` ones give their memory to the results.
    """

    fn: Callable[..., Any]
    signature: inspect.Signature
    batch: frozenset[str]
    static: frozenset[str]
    donate: frozenset[str]

    @property
    def name(self) -> str:
        """What errors call the step."""
        return name_of(self.fn)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> "Call":
        """Match a call's arguments to the parameters.

        Raises:
            TypeError: As Python does, for a missing or an unexpected argument.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        static = {k: v for k, v in bound.arguments.items() if k in self.static}
        trees = {k: v for k, v in bound.arguments.items() if k not in self.static}
        flat = {name: flatten(tree) for name, tree in trees.items()}
        return Call(
            self,
            bound,
            static,
            {name: spec for name, (_, spec) in flat.items()},
            [leaf for leaves, _ in flat.values() for leaf in leaves],
        )


@dataclass(frozen=True)
class Call:
    """One call of a step: the leaves of all arguments in one list."""

    signature: Signature
    bound: inspect.BoundArguments
    static: dict[str, Any]
    specs: dict[str, optree.PyTreeSpec]
    leaves: list[Any]

    def paths(self) -> list[str]:
        """The expression that names each leaf, such as `params['w'][0]`."""
        trees = {name: self.bound.arguments[name] for name in self.specs}
        return [p for name, t in trees.items() for p in flatten_with_paths(t, name)[0]]

    def owners(self) -> list[str]:
        """The parameter that each leaf belongs to."""
        return [n for n, spec in self.specs.items() for _ in range(spec.num_leaves)]

    def without_memory(self) -> "Call":
        """The same call on tensors that hold none, to be kept with a program."""
        leaves = [without_memory(leaf) for leaf in self.leaves]
        return replace(self, bound=self.with_leaves(leaves), leaves=leaves)

    def opaque(self) -> list[Any]:
        """Static values with an inside: functions, configurations, tuples."""
        known = (torch.Tensor, *SCALARS)
        values = [*self.static.values(), *self.leaves]
        return [value for value in values if not isinstance(value, known)]

    def donated(self) -> set[int]:
        """The positions of the leaves that give up their memory."""
        if not self.signature.donate:
            return set()
        owners = enumerate(self.owners())
        return {n for n, owner in owners if owner in self.signature.donate}

    def key(self) -> Hashable:
        """Equal for calls that the same program serves.

        Raises:
            ArgumentError: A static value or leaf cannot be hashed.
        """
        leaves = tuple(_leaf_key(leaf) for leaf in self.leaves)
        static = tuple((name, _static_key(v)) for name, v in self.static.items())
        key = (tuple(self.specs.items()), static, leaves)
        try:
            hash(key)
        except TypeError:
            self._refuse_unhashable()
            raise
        return key

    def apply(self, leaves: Sequence[Any]) -> Any:
        """Call the step's function with other leaves in the same places."""
        bound = self.with_leaves(leaves)
        return self.signature.fn(*bound.args, **bound.kwargs)

    def with_leaves(self, leaves: Sequence[Any]) -> inspect.BoundArguments:
        """The arguments with other leaves in the same places."""
        remaining = iter(leaves)
        arguments = dict(self.bound.arguments)
        for name, spec in self.specs.items():
            part = [next(remaining) for _ in range(spec.num_leaves)]
            arguments[name] = unflatten(spec, part)
        signature = self.signature.signature
        return inspect.BoundArguments(signature, arguments)  # type: ignore[arg-type]

    def _refuse_unhashable(self) -> None:
        named = list(zip(self.paths(), map(_leaf_key, self.leaves), strict=True))
        for path, value in named + list(self.static.items()):
            try:
                hash(value)
            except TypeError:
                raise ArgumentError(_unhashable(path, value)) from None


def _unhashable(path: str, value: Any) -> str:
    found = value[-1] if isinstance(value, tuple) else value
    kind = f"{type(found).__module__}.{type(found).__qualname__}"
    return (
        f"{path} is a {kind}, which is neither a tensor nor a value that can be "
        "hashed. Pass a torch.Tensor (torch.as_tensor), a Python scalar or a string, "
        "or register the class as a node: optree.register_pytree_node(..., "
        "namespace='yafsdp_fn')."
    )


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    return "float" if isinstance(leaf, float) else _static_key(leaf)


def _static_key(value: Any) -> Hashable:
    """Tells apart what Python calls equal: `1`, `1.0` and `True`."""
    return (type(value), repr(value) if isinstance(value, SCALARS) else value)


# --- resolving the options of `shard` -------------------------------------------------


def signature_of(
    fn: Callable[..., Any], batch: Names, static: Names, donate: Names
) -> Signature:
    """Resolve positions and names of parameters.

    Args:
        fn: The step.
        batch: Which parameters are the batch; `None` is the one called `batch`, else
            the last one that is not static.
        static: Which parameters are hashed values of the program.
        donate: Which parameters give up their memory.

    Raises:
        ArgumentError: A position or name that `fn` does not have, a parameter that is
            both static and batch, or a function that takes no parameter.
    """
    signature = inspect.signature(fn)
    parameters = list(signature.parameters)
    fixed = _resolve(static, parameters, "static", fn)
    given = _resolve(donate, parameters, "donate", fn)
    if batch is None:
        chosen = _default_batch([p for p in parameters if p not in fixed])
    else:
        chosen = _resolve(batch, parameters, "batch", fn)
    for first, second, words in ((chosen, fixed, "batch"), (given, fixed, "donate")):
        if both := first & second:
            raise ArgumentError(
                f"parameter {min(both)!r} of {name_of(fn)} is named in static_argnums "
                f"and in {words}_argnums; leave it in one of them."
            )
    return Signature(fn, signature, chosen, fixed, given)


def _default_batch(parameters: list[str]) -> frozenset[str]:
    if "batch" in parameters:
        return frozenset({"batch"})
    return frozenset(parameters[-1:])


def _resolve(
    which: Names, parameters: list[str], option: str, fn: Callable[..., Any]
) -> frozenset[str]:
    if which is None:
        return frozenset()
    items = (which,) if isinstance(which, int | str) else tuple(which)
    return frozenset(_parameter(item, parameters, option, fn) for item in items)


def _parameter(
    item: int | str, parameters: list[str], option: str, fn: Callable[..., Any]
) -> str:
    if item in parameters:
        return str(item)
    if isinstance(item, int) and -len(parameters) <= item < len(parameters):
        return parameters[item]
    raise ArgumentError(
        f"{option}: {name_of(fn)} has no parameter {item!r}; it has "
        f"{', '.join(f'{i} {p!r}' for i, p in enumerate(parameters)) or 'none'}."
    )


def name_of(fn: Callable[..., Any]) -> str:
    """A function's name; a callable without one is shown."""
    return getattr(fn, "__qualname__", repr(fn))
