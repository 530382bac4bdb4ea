"""remat: trade memory for compute, as a functional transform."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

from ._capture import captures, frozen
from ._errors import ArgumentError
from ._swap import Swap
from ._tree import flatten, unflatten

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
Tensors = tuple[torch.Tensor, ...]


def remat(
    fn: Callable[Parameters, Returned], save: Iterable[str] = ()
) -> Callable[Parameters, Returned]:
    """Let a function save its inputs for backward instead of what it computes.

    When the gradient is taken the function is computed again, at that moment. The
    result and the gradient are bit for bit those of `fn`.

    Args:
        fn: A pure function of pytrees. Tensors that it closes over count as inputs.
        save: Names of values, given by `name_value`, that are saved as well, so that
            what leads to them is not computed again.

    Returns:
        The same function. It may be used below any `torch.func` transform, inside of a
        sharded function and outside of one.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; the names
    are `jax.checkpoint`'s.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> block = yf.remat(lambda w, x: torch.tanh(x @ w).sum())
        >>> torch.func.grad(block)(torch.zeros(2, 2), torch.ones(3, 2))
        tensor([[3., 3.],
                [3., 3.]])
    """
    names = frozenset((save,) if isinstance(save, str) else save)

    @functools.wraps(fn)
    def rematerialised(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        leaves, spec = flatten((args, kwargs))
        now = frozen(fn)
        captured = [t for t in captures(now).tensors if _may_vary(t)]
        body = _Body(now, spec, leaves, captured, names)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        out = _Remat.apply(body, *tensors, *captured)
        return body.unflatten(out[: len(out) - body.saved])

    return rematerialised


def name_value(value: torch.Tensor, name: str) -> torch.Tensor:
    """Name a value, so that `remat(fn, save=[name])` saves it.

    Args:
        value: Any tensor.
        name: Its name; several values may share one.

    Returns:
        The same value.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> def block(w, x):
        ...     hidden = yf.name_value(torch.tanh(x @ w), "hidden")
        ...     return hidden.square().sum()
        >>> step = torch.func.grad(yf.remat(block, save=["hidden"]))
        >>> step(torch.zeros(2, 2), torch.ones(3, 2)).abs().max()
        tensor(0.)
    """
    ledger = _ledger.get()
    return value if ledger is None else ledger.visit(value, name)


def _may_vary(tensor: torch.Tensor) -> bool:
    """Whether a gradient may be wanted with respect to a captured tensor."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


# --- inside ---------------------------------------------------------------------------


@dataclass
class _Body:
    """A call of the function, as a function of its tensors alone."""

    fn: Callable[..., Any]
    spec: Any
    leaves: list[Any]
    captured: Sequence[torch.Tensor]
    names: frozenset[str]
    out_spec: Any = None
    out_leaves: list[Any] = field(default_factory=list)
    saved: int = 0

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        """Compute, and note how the result is put together."""
        count = len(tensors) - len(self.captured)
        given = iter(tensors[:count])
        leaves = [next(given) if _is_tensor(leaf) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(self.spec, leaves)
        swaps = dict(zip(map(id, self.captured), tensors[count:], strict=True))
        with Swap(swaps):
            out = self.fn(*args, **kwargs)
        self.out_leaves, self.out_spec = flatten(out)
        found = tuple(leaf for leaf in self.out_leaves if _is_tensor(leaf))
        if not found:
            raise ArgumentError(
                "remat: the function returns no tensor. Return what the rest of the "
                "step needs of it."
            )
        return found

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        found = iter(tensors)
        leaves = [next(found) if _is_tensor(leaf) else leaf for leaf in self.out_leaves]
        return unflatten(self.out_spec, leaves)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


class _Remat(torch.autograd.Function):
    """Saves inputs and named values; computes the rest again to differentiate it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(body: _Body, *tensors: torch.Tensor) -> Tensors:
        with _recording(body.names, []) as ledger:
            out = body(*tensors)
        body.saved = len(ledger.values)
        return (*out, *ledger.values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        body, *tensors = inputs
        ctx.body, ctx.count = body, len(tensors)
        ctx.save_for_backward(*tensors, *output[len(output) - body.saved :])
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*(t for t in output if not _may_vary(t)))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        tensors = ctx.saved_tensors[: ctx.count]
        moving = [n for n, t in enumerate(tangents) if t is not None]

        def again(*inputs: torch.Tensor) -> Tensors:
            merged = list(tensors)
            for n, tensor in zip(moving, inputs, strict=True):
                merged[n] = tensor
            with _recording(ctx.body.names, []) as ledger:
                return (*ctx.body(*merged), *ledger.values)

        primals = tuple(tensors[n] for n in moving)
        return torch.func.jvp(again, primals, tuple(tangents[n] for n in moving))[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        tensors = ctx.saved_tensors[: ctx.count]
        saved = list(ctx.saved_tensors[ctx.count :])
        varying = [n for n, t in enumerate(tensors) if _may_vary(t)]

        def again(*inputs: torch.Tensor) -> Tensors:
            merged = list(tensors)
            for n, tensor in zip(varying, inputs, strict=True):
                merged[n] = tensor
            with _recording(ctx.body.names, saved):
                return tuple(t for t in ctx.body(*merged) if _may_vary(t))

        out, pull = torch.func.vjp(  # type: ignore[misc]
            again, *(tensors[n] for n in varying)
        )
        wanted = [c for c in cotangents if c is None or _may_vary(c)][: len(out)]
        pairs = zip(out, wanted, strict=True)
        found = pull(tuple(torch.zeros_like(o) if c is None else c for o, c in pairs))
        grads: list[Any] = [None] * (1 + len(tensors))
        for n, grad in zip(varying, found, strict=True):
            grads[1 + n] = grad
        return tuple(grads)


# --- named values ---------------------------------------------------------------------


@dataclass
class _Ledger:
    """Named values: noted on the way forward, put in place on the way back."""

    names: frozenset[str]
    given: list[torch.Tensor]
    values: list[torch.Tensor] = field(default_factory=list)

    def visit(self, value: torch.Tensor, name: str) -> torch.Tensor:
        if name not in self.names:
            return value
        self.values.append(value)
        if not self.given:
            return value
        return _Known.apply(value, self.given[len(self.values) - 1])


class _Known(torch.autograd.Function):
    """A value that is known already, with the gradient of the one it stands for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        return known.view_as(known)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is needed to pass a gradient on."""

    @staticmethod
    def jvp(ctx: Any, value: torch.Tensor | None, known: torch.Tensor | None) -> Any:
        return None if value is None else value.view_as(value)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return cotangent, None


_ledger: ContextVar[_Ledger | None] = ContextVar("ledger", default=None)


@contextmanager
def _recording(names: frozenset[str], given: list[torch.Tensor]) -> Iterator[_Ledger]:
    ledger = _Ledger(names, given)
    token = _ledger.set(ledger)
    try:
        yield ledger
    finally:
        _ledger.reset(token)
