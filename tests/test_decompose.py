"""Operators that are taken apart when traced give what they give whole."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import agree, mesh_of
from test_cases import normal
from torch.func import grad, vjp

import yafsdp_fn as yf

LABELS = torch.tensor([1, 3, 0, 2, -100])

# --- likelihoods ----------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(4,), (5, 4), (5, 4, 3), (5, 4, 2, 3)], ids=str)
def test_likelihoods_of_every_form_are_right(
    shape: tuple[int, ...], reduction: Any, weighted: bool
) -> None:
    count = math.prod(shape) // 4
    target = LABELS.repeat(count)[:count].view(shape[:-1] and (shape[0], *shape[2:]))
    weights = normal(4).exp() if weighted else None

    def loss(scale: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        scores = (batch.view(shape) * scale).log_softmax(min(1, len(shape) - 1))
        made = F.nll_loss(scores, target, weights, reduction=reduction)
        return (made * torch.arange(1.0, 1 + made.numel()).view(made.shape)).sum()

    def slope(scale: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return grad(loss)(scale, batch).square()

    for step in (grad(loss), grad(slope)):
        agree(step, normal(), normal(*shape), steps=1)


@pytest.mark.parametrize("weight", [math.inf, math.nan, 0.0])
def test_what_no_target_names_has_no_gradient(weight: float) -> None:
    """Whatever the gradients of the targets are, the kernel makes the others zero."""

    def gradient(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        _, pull = vjp(lambda s: F.nll_loss(s, LABELS, reduction="none"), batch @ w)
        (made,) = pull(torch.full((5,), weight, dtype=torch.float64))
        return made

    agree(gradient, normal(6, 4), normal(5, 6), steps=1)


def test_the_gradient_of_a_likelihood_scatters_as_few_numbers_as_targets() -> None:
    def loss(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(batch @ w, LABELS)

    traced = yf.shard(grad(loss), mesh=mesh_of(2)).trace(normal(6, 4), normal(5, 6))
    ops = [str(node.op) for node in traced.graph.nodes]
    assert ops.count("aten.scatter.src") == 1
    assert "aten.mul.Tensor" not in ops


# --- views ----------------------------------------------------------------------------


def test_a_shuffle_of_channels_moves_no_batch() -> None:
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return F.channel_shuffle(batch, 3).sum(0) * w

    lowered = yf.shard(step, mesh=mesh_of(2)).lower(normal(6, 1), normal(5, 6, 2))
    assert lowered.cost_analysis()["unplanned_collectives"] == 0
    agree(step, normal(6, 1), normal(5, 6, 2))
