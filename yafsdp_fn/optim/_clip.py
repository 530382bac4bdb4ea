"""Global norms, and clipping by them.

Only powers, sums and one root are used: on a mesh a sum of shards stays pending
through the sum over leaves, so that a norm costs one all-reduce of one number.
"""

import functools
import math
import operator

import optree
import torch
from torch import Tensor

from .._tree import NAMESPACE
from ._leaves import PyTree, learnable, map_learnable, root, working_dtype
from ._numbers import Number, as_operand, check_number, check_plain
from ._transform import GradientTransformation, stateless


def global_norm(tree: PyTree, p: float = 2.0) -> Tensor:
    """The p-norm of all leaves of a tree taken as one vector.

    Args:
        tree: tensors of any shapes; leaves that are neither floating nor complex do not
            count, empty ones add nothing.
        p: order of the norm, above 0; `math.inf` is the largest magnitude.

    Returns:
        A 0-dim tensor in the leaves' unit, float64 if a leaf is, else float32.

    Raises:
        ArgumentError: `p` is not a positive Python number.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> yf.optim.global_norm({"a": torch.tensor([3.0]), "b": torch.tensor(-4.0)})
        tensor(5.)
    """
    _check_order(p)
    leaves = optree.tree_leaves(tree, namespace=NAMESPACE)
    # An empty leaf has no largest element.
    leaves = [leaf for leaf in leaves if learnable(leaf) and leaf.numel() > 0]
    if not leaves:
        return torch.zeros(())
    terms = [_term(leaf, p).to(leaves[0].device) for leaf in leaves]
    if p == math.inf:
        return functools.reduce(torch.maximum, terms)
    return root(functools.reduce(operator.add, terms), p)


def _check_order(p: float) -> None:
    if p != math.inf:
        check_plain("p", p, math.ulp(0.0), math.inf, "p=2.0, or p=math.inf")


def _term(leaf: Tensor, p: float) -> Tensor:
    """What one leaf adds to the norm, before the root, in at least float32."""
    leaf = leaf.to(working_dtype(leaf.dtype))
    if p == math.inf:
        return leaf.abs().amax()
    magnitudes = leaf if p == 2 and not leaf.is_complex() else leaf.abs()
    return magnitudes.pow(p).sum()


def clip_by_global_norm(max_norm: Number, p: float = 2.0) -> GradientTransformation:
    """Scale all gradients by one factor so that their norm is at most `max_norm`.

    The mathematics of `torch.nn.utils.clip_grad_norm_` (Pascanu, Mikolov and Bengio,
    arXiv:1211.5063): the factor is `max_norm / (norm + 1e-6)`, at most 1.

    Args:
        max_norm: largest norm, in the gradients' unit, above 0: a Python number, a
            0-dim tensor, or a live number.
        p: order of the norm, above 0; `math.inf` is the largest magnitude.

    Returns:
        A transformation without state. Gradients keep shape and dtype; leaves that are
        neither floating nor complex come out as `None`.

    Raises:
        ArgumentError: `max_norm` or `p` is out of its range.

    Example:
        >>> import torch, yafsdp_fn as yf
        >>> clip = yf.optim.clip_by_global_norm(1.0)
        >>> grads = {"a": torch.tensor([3.0]), "b": torch.tensor([-4.0]), "c": None}
        >>> clip.update(grads, clip.init(grads))[0]
        {'a': tensor([0.6000]), 'b': tensor([-0.8000]), 'c': None}
    """
    check_number("max_norm", max_norm, math.ulp(0.0), math.inf, "max_norm=1.0")
    _check_order(p)

    def clip(grads: PyTree) -> PyTree:
        norm = global_norm(grads, p)
        limit = as_operand(max_norm, norm.dtype, norm.device)
        factor = (limit / (norm + 1e-6)).clamp(max=1)
        return map_learnable(lambda g: (g * factor.to(g.device)).to(g.dtype), grads)

    return stateless(clip)
