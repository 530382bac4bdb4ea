"""The shape of an optimiser, and how optimisers combine."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import optree
from torch import Tensor

from .._errors import ArgumentError
from ._leaves import PyTree, aligned, flatten, map_learnable, working_dtype
from ._numbers import Number, as_operand, check_number

State: TypeAlias = Any


class GradientTransformation(NamedTuple):
    """Two pure functions that turn gradients into updates.

    The shape is optax's (DeepMind, 2020). Every optimiser of this module is one, and
    so is a pair of functions of your own.

    Attributes:
        init: `init(params) -> state`.
        update: `update(grads, state, params=None) -> (updates, state)`. Updates are
            added to the parameters: a descent step is negative.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> signs = yf.optim.GradientTransformation(
        ...     init=lambda params: (),
        ...     update=lambda grads, state, params=None: (-grads.sign(), state),
        ... )
        >>> signs.update(torch.tensor([3.0, -2.0]), signs.init(None))
        (tensor([-1.,  1.]), ())
    """

    init: Callable[[PyTree], State]
    update: Callable[..., tuple[PyTree, State]]


def stateless(fn: Callable[[PyTree], PyTree]) -> GradientTransformation:
    """The transformation that applies `fn` to the gradients and remembers nothing."""

    def update(
        grads: PyTree, state: State, params: PyTree = None
    ) -> tuple[PyTree, State]:
        return fn(grads), state

    return GradientTransformation(lambda params: (), update)


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply transformations one after another.

    Args:
        transformations: each one's updates are the next one's gradients.

    Returns:
        A transformation whose state is the tuple of their states.

    Raises:
        ArgumentError: an argument is not a transformation.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> halved = yf.optim.chain(yf.optim.scale(0.5), yf.optim.sgd(1.0))
        >>> updates, state = halved.update(torch.tensor([4.0]), halved.init(None))
        >>> updates
        tensor([-2.])
    """
    for position, transformation in enumerate(transformations):
        if not hasattr(transformation, "update"):
            raise ArgumentError(
                f"argument {position} of chain is a {type(transformation).__name__},"
                " not a transformation. Write chain(clip_by_global_norm(1.0), ...)."
            )

    def init(params: PyTree) -> State:
        return tuple(each.init(params) for each in transformations)

    def update(
        grads: PyTree, state: State, params: PyTree = None
    ) -> tuple[PyTree, State]:
        _check_chained(state, len(transformations))
        new_states = []
        for each, old in zip(transformations, state, strict=True):
            grads, new = each.update(grads, old, params)
            new_states.append(new)
        return grads, tuple(new_states)

    return GradientTransformation(init, update)


def _check_chained(state: State, length: int) -> None:
    if not isinstance(state, tuple) or len(state) != length:
        raise ArgumentError(
            f"state is not that of a chain of {length} transformations."
            " Write state = chain(...).init(params), and pass on what update returns."
        )


def scale(factor: Number) -> GradientTransformation:
    """Multiply every gradient by one number.

    Args:
        factor: a Python number, a 0-dim tensor, or a live number. No unit; -1 turns
            gradients into a step of plain descent with learning rate 1.

    Returns:
        A transformation without state. Gradients keep shape, dtype and structure.

    Raises:
        ArgumentError: `factor` is not one number.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> flip = yf.optim.scale(-1.0)
        >>> flip.update([torch.tensor([1.0, 2.0]), None], flip.init(None))[0]
        [tensor([-1., -2.]), None]
    """
    check_number("factor", factor, -math.inf, math.inf, "factor=-1.0")

    def scaled(leaf: Tensor) -> Tensor:
        operand = as_operand(factor, working_dtype(leaf.dtype), leaf.device)
        return (leaf * operand).to(leaf.dtype)

    return stateless(lambda grads: map_learnable(scaled, grads))


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Add updates to parameters.

    Args:
        params: a tree of tensors of any shapes and dtypes.
        updates: the same structure, with the same shapes; `None` in place of a leaf
            leaves its parameter as it is.

    Returns:
        A tree as `params`: each sum in the dtype and memory layout of its parameter.

    Raises:
        ArgumentError: structure or shapes differ; the message has the path.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> params = {"weight": torch.ones(2), "steps": torch.tensor(7)}
        >>> updates = {"weight": torch.tensor([0.5, -0.5]), "steps": None}
        >>> yf.optim.apply_updates(params, updates)
        {'weight': tensor([1.5000, 0.5000]), 'steps': tensor(7)}
    """
    leaves, spec = flatten(params)
    pairs = zip(leaves, aligned("updates", updates, params), strict=True)
    # The parameter goes first: an elementwise result has its first operand's layout.
    moved = [p if u is None else (p + u).to(p.dtype) for p, u in pairs]
    return optree.tree_unflatten(spec, moved)
