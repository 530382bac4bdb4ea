"""Differentiating a sharded function from outside of it.

To a transform outside, a sharded function is one operator: its derivative is a sharded
function as well, the vjp of the step, traced and planned like the step itself.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from ._arguments import Call, Signature
from ._capture import Captures
from ._distribute import full
from ._errors import ArgumentError
from ._graph import Graph
from ._torch import is_functorch_wrapped
from ._tree import flatten, unflatten

if TYPE_CHECKING:
    from ._shard import ShardedFunction


def is_differentiated(call: Call) -> bool:
    """Whether a transform, or autograd, from outside looks at a leaf of a call."""
    return any(
        isinstance(leaf, torch.Tensor)
        and (
            is_functorch_wrapped(leaf)
            or (leaf.requires_grad and torch.is_grad_enabled())
        )
        for leaf in call.leaves
    )


def refuse_captured_leaves(call: Call, captured: Captures) -> None:
    """Refuse a `backward` that would leave out tensors that the step closes over.

    Raises:
        ArgumentError: Says what to write instead.
    """
    leaves = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    if any(x.requires_grad and not is_functorch_wrapped(x) for x in leaves) and any(
        tensor.requires_grad for tensor in captured.tensors
    ):
        raise ArgumentError(
            "the step closes over a tensor that requires a gradient. Pass it as an "
            "argument, so that its gradient can be sharded; or detach it."
        )


def differentiable_call(sharded: "ShardedFunction[..., Any]", call: Call) -> Any:
    """Call a sharded function as one differentiable operator."""
    site = _Site(sharded, call)
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    return site.unflatten(_Sharded.apply(site, *tensors))


@dataclass
class _Site:
    """One call of a sharded function, as a function of its tensors."""

    sharded: "ShardedFunction[..., Any]"
    call: Call
    out_spec: Any = None
    out_leaves: list[Any] = field(default_factory=list)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Execute, and note how the result is put together."""
        bound = self.call.with_leaves(self.filled(tensors))
        out = self.sharded(*bound.args, **bound.kwargs)
        self.out_leaves, self.out_spec = flatten(out)
        made = [x for x in self.out_leaves if isinstance(x, torch.Tensor)]
        # Autograd wants no argument back as it is.
        given = {id(tensor) for tensor in tensors}
        return tuple(x.clone() if id(x) in given else x for x in made)

    def filled(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        given = iter(tensors)
        return [
            next(given) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in self.call.leaves
        ]

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        found = iter(tensors)
        leaves = [
            next(found) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in self.out_leaves
        ]
        return unflatten(self.out_spec, leaves)


class _Sharded(torch.autograd.Function):
    """The sharded step, whose derivatives are sharded steps."""

    @staticmethod
    def forward(site: _Site, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return site.run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.site, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.varies = [_varies(t) for t in output]
        ctx.mark_non_differentiable(*(t for t in output if not _varies(t)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        pairs = zip(cotangents, ctx.varies, strict=True)
        wanted = [cotangent for cotangent, varies in pairs if varies]
        site = ctx.site
        bound = site.call.with_leaves(site.filled(tensors))
        pull = site.sharded.gradient()
        # Autograd takes over a gradient that nobody else holds, and copies others.
        grads = pull(wanted, *bound.args, **bound.kwargs)[::-1]
        return (None, *(grads.pop() if _varies(t) else None for t in tensors))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> NoReturn:
        raise _inside("jvp", ctx.site)

    @staticmethod
    def vmap(info: Any, in_dims: Any, site: _Site, *_: torch.Tensor) -> NoReturn:
        raise _inside("vmap", site)


def _inside(transform: str, site: _Site) -> ArgumentError:
    return ArgumentError(
        f"{transform} of {site.sharded!r} from outside cannot be sharded. Put it "
        f"inside: yf.shard({transform}(f, ...)), not {transform}(yf.shard(f), ...)."
    )


def _varies(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


# --- the derivative of a step ---------------------------------------------------------


def pullback(step: Signature) -> Callable[..., list[torch.Tensor]]:
    """The vjp of a step: a function of vectors of its results, and its arguments.

    It returns a gradient for every floating leaf of the arguments, in their order.
    """

    def gradients(
        vectors: list[torch.Tensor], /, *args: Any, **kwargs: Any
    ) -> list[torch.Tensor]:
        call = step.bind(args, kwargs)

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = iter(tensors)
            filled = [next(given) if _is_varying(x) else x for x in call.leaves]
            out, _ = flatten(call.apply(filled))
            return tuple(x for x in out if _is_varying(x))

        primals = [leaf for leaf in call.leaves if _is_varying(leaf)]
        _, pull = torch.func.vjp(run, *primals)  # type: ignore[misc]
        return list(pull(tuple(vectors)))

    name = "vectors"
    while name in step.signature.parameters:  # a gradient's own gradient
        name = f"{name}_"
    first = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    parameters = [first, *step.signature.parameters.values()]
    gradients.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    gradients.__qualname__ = f"the gradient of {step.name}"
    return gradients


def _is_varying(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and _varies(leaf)


def like_arguments(call: Call, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients in the form of what they belong to: plain for a plain tensor."""
    first = next(iter(call.specs.values())).num_leaves
    primals = [leaf for leaf in call.leaves[first:] if _is_varying(leaf)]
    pairs = zip(primals, grads, strict=True)
    return [grad if isinstance(x, DTensor) else full(grad) for x, grad in pairs]


def match_gradients(call: Call, graph: Graph) -> list[int | None]:
    """Every gradient takes the place of the argument that it belongs to."""
    first = next(iter(call.specs.values())).num_leaves
    leaves = enumerate(call.leaves)
    return [n for n, leaf in leaves if n >= first and _is_varying(leaf)]
