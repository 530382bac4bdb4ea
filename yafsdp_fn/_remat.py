"""remat: trade memory for compute, as a functional transform."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from ._capture import captures, frozen
from ._errors import ArgumentError
from ._swap import Swap
from ._torch import forward_mode, unwrap_if_dead
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
        ...     hidden = yf.name_value(x @ w, "hidden")  # the product is not repeated
        ...     return torch.tanh(hidden).square().sum()
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
    """A call of the function, as a function of its tensors and of named values."""

    fn: Callable[..., Any]
    spec: Any
    leaves: list[Any]
    captured: Sequence[torch.Tensor]
    names: frozenset[str]
    out_spec: Any = None
    out_leaves: list[Any] = field(default_factory=list)
    saved: int = 0

    def __call__(self, tensors: Tensors, known: Tensors = ()) -> Tensors:
        """Compute, and note how the result is put together; named values come last."""
        with _recording(self.names, known) as ledger:
            out = self._apply(tensors)
        self.out_leaves, self.out_spec = flatten(out)
        self.saved = len(ledger.values)
        found = tuple(leaf for leaf in self.out_leaves if _is_tensor(leaf))
        if not found:
            raise ArgumentError(
                "remat: the function returns no tensor. Return what the rest of the "
                "step needs of it."
            )
        return (*found, *ledger.values)

    def _apply(self, tensors: Tensors) -> Any:
        count = len(tensors) - len(self.captured)
        given = iter(tensors[:count])
        leaves = [next(given) if _is_tensor(leaf) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(self.spec, leaves)
        with Swap(dict(zip(map(id, self.captured), tensors[count:], strict=True))):
            return self.fn(*args, **kwargs)

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        found = iter(tensors)
        leaves = [next(found) if _is_tensor(leaf) else leaf for leaf in self.out_leaves]
        return unflatten(self.out_spec, leaves)


@dataclass
class _Batched:
    """A body over a batch; what it returns is batched on dimension 0."""

    body: Any
    in_dims: tuple[int | None, ...]
    options: dict[str, Any]

    def __call__(self, tensors: Tensors, known: Tensors = ()) -> Tensors:
        dims = (self.in_dims, (0,) * len(known))
        return torch.func.vmap(self.body, dims, **self.options)(tensors, known)

    @property
    def saved(self) -> int:
        return self.body.saved


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


class _Remat(torch.autograd.Function):
    """Saves inputs and named values; computes the rest again to differentiate it."""

    @staticmethod
    def forward(body: Any, *tensors: torch.Tensor) -> Tensors:
        taken = {id(tensor) for tensor in tensors}
        # autograd refuses to save an input that is returned as it is
        return tuple(t.view_as(t) if id(t) in taken else t for t in body(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        body, *tensors = inputs
        ctx.body, ctx.count = body, len(tensors)
        ctx.save_for_backward(*tensors, *output[len(output) - body.saved :])
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*(t for t in output if not _may_vary(t)))

    @staticmethod
    def vmap(info: Any, in_dims: Any, body: Any, *tensors: torch.Tensor) -> Any:
        options = {"randomness": info.randomness}
        out = _Remat.apply(_Batched(body, in_dims[1:], options), *tensors)
        return out, (0,) * len(out)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        # A transform inside of this one would lose the tangents of those around it:
        # compute on dual numbers, at the level that asks for them.
        with forward_mode():
            pairs = zip(ctx.saved_tensors[: ctx.count], tangents, strict=True)
            return tuple(map(_tangent, ctx.body(tuple(_dual(*p) for p in pairs))))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        # The level at which they were saved has ended if `torch.func.vjp` pulls.
        kept = tuple(map(unwrap_if_dead, ctx.saved_tensors))
        tensors, saved = kept[: ctx.count], kept[ctx.count :]
        varying = [n for n, t in enumerate(tensors) if _may_vary(t)]

        def again(*inputs: torch.Tensor) -> Tensors:
            merged = list(tensors)
            for n, tensor in zip(varying, inputs, strict=True):
                merged[n] = tensor
            out = ctx.body(tuple(merged), saved)
            return tuple(t for t in out[: len(out) - len(saved)] if _may_vary(t))

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


def _dual(tensor: torch.Tensor, tangent: torch.Tensor | None) -> torch.Tensor:
    if tangent is None:
        return tensor
    return forward_ad.make_dual(forward_ad.unpack_dual(tensor).primal, tangent)


def _tangent(value: torch.Tensor) -> torch.Tensor | None:
    if not _may_vary(value):
        return None
    primal, tangent = forward_ad.unpack_dual(value)
    return torch.zeros_like(primal) if tangent is None else tangent


# --- named values ---------------------------------------------------------------------


@dataclass
class _Ledger:
    """Named values: noted on the way forward, put in place on the way back."""

    names: frozenset[str]
    given: Sequence[torch.Tensor]
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
def _recording(
    names: frozenset[str], given: Sequence[torch.Tensor]
) -> Iterator[_Ledger]:
    ledger = _Ledger(names, given)
    token = _ledger.set(ledger)
    try:
        yield ledger
    finally:
        _ledger.reset(token)
