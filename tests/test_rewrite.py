"""Rewrites: fewer operators, the same result, and nothing else is touched."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from support import agree, assert_same, mesh_of
from torch.func import grad, grad_and_value, hessian

import yafsdp_fn as yf
from yafsdp_fn import _trace
from yafsdp_fn._graph import Graph
from yafsdp_fn.testing import RandomStep, steps

aten = torch.ops.aten
Step = Callable[..., Any]


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


W, X = normal(6, 4), normal(5, 6)
LABELS = torch.tensor([1, 3, 0, 2, -100])


def graph(step: Step, *args: Any) -> Graph:
    return yf.shard(step, mesh=mesh_of(2)).trace(*args).graph


def operators(step: Step, *args: Any) -> Counter[str]:
    """How often each operator stands in a step, as it is rewritten."""
    names = (str(node.op) for node in graph(step, *args).nodes)
    return Counter(name.removeprefix("aten.") for name in names)


def as_traced(step: Step, *args: Any) -> Counter[str]:
    """The same, as it is traced."""
    with mock.patch.object(_trace, "rewrite", lambda graph: graph):
        return operators(step, *args)


def assert_rewritten(step: Step, *args: Any) -> Counter[str]:
    """The operators of a step that gives its result as before, from fewer of them."""
    found, before = operators(step, *args), as_traced(step, *args)
    assert found.total() <= before.total()
    assert found != before
    agree(step, *args, world=2, rtol=1e-12, steps=1)
    return found


def assert_untouched(step: Step, *args: Any) -> None:
    assert operators(step, *args) == as_traced(step, *args)
    agree(step, *args, world=2, rtol=1e-12, steps=1)


@settings(max_examples=settings().max_examples // 20)
@given(step=steps(most=6))
def test_any_step_gives_the_same_without_rewrites(step: RandomStep) -> None:
    found = yf.shard(step.fn, mesh=mesh_of(1))(*step.args)
    with mock.patch.object(_trace, "rewrite", lambda graph: graph):
        wanted = yf.shard(step.fn, mesh=mesh_of(1))(*step.args)
    assert_same(found, yf.full(wanted), rtol=1e-12)


# --- silu -----------------------------------------------------------------------------


def of_silu(power: int) -> Step:
    """A loss, or one of its derivatives."""

    def loss(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return F.silu(batch @ w).square().sum()

    def penalised(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return grad(loss)(w, batch).square().sum()

    return (loss, grad(loss), grad(penalised), grad(grad_of(penalised)))[power]


def grad_of(fn: Step) -> Step:
    return lambda w, batch: grad(fn)(w, batch).sin().sum()


def test_the_gradient_of_silu_is_one_operator() -> None:
    found = assert_rewritten(of_silu(1), W, X)
    assert found["silu_backward.default"] == 1
    assert found["sigmoid.default"] == 0


@pytest.mark.parametrize("power", [2, 3])
def test_further_gradients_of_silu_are_right(power: int) -> None:
    agree(of_silu(power), W, X, rtol=1e-9, steps=1)


def test_a_hessian_through_silu_is_right() -> None:
    step = lambda w, batch: hessian(of_silu(0))(w, batch).sum((2, 3))  # noqa: E731
    agree(step, W, X, rtol=1e-12, steps=1)


def like_silu(
    x: torch.Tensor, one: float = 1.0, more: float = 1, factor: float | None = None
) -> torch.Tensor:
    """The gradient of silu, as torch writes it, or nearly."""
    sigmoid = torch.sigmoid(x if factor is None else x * factor)
    rest = torch.full_like(x, one) - sigmoid
    return (x.cos() * sigmoid) * aten.add.Scalar(x * rest, more)


def test_what_is_written_as_torch_writes_it_is_the_gradient_of_silu() -> None:
    found = assert_rewritten(lambda w, batch: like_silu(batch @ w), W, X)
    assert found["silu_backward.default"] == 1


NEARLY = [{"one": 2.0}, {"more": 2}, {"factor": 1.702}]


@pytest.mark.parametrize("changed", NEARLY, ids=str)
def test_what_is_nearly_the_gradient_of_silu_stays(changed: dict[str, float]) -> None:
    assert_untouched(lambda w, batch: like_silu(batch @ w, **changed), W, X)


def test_a_larger_one_keeps_its_shape() -> None:
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        s = torch.sigmoid(batch)
        rest = torch.full((3, 5, 6), 1.0, dtype=torch.float64) - s
        return (batch.cos() * s) * aten.add.Scalar(batch * rest, 1) @ w

    agree(step, W, X, steps=1)


# --- updates --------------------------------------------------------------------------


def updated(apply: Step, optimiser: Any = None) -> tuple[Step, Any, Any, torch.Tensor]:
    """A step that applies the updates of an optimiser, and its arguments."""
    optimiser = optimiser or yf.optim.adamw(0.1)

    def step(w: torch.Tensor, state: Any, batch: torch.Tensor) -> Any:
        loss = lambda w: (batch @ w).square().mean()  # noqa: E731
        grads = grad(loss)(w)
        updates, state = optimiser.update(grads, state, w)
        return apply(w, updates), state

    return step, W, optimiser.init(W), X


def test_a_fused_update_is_not_added_to_what_it_was_taken_from() -> None:
    step, *args = updated(yf.optim.apply_updates)
    assert as_traced(step, *args)["sub.Tensor"] == 1
    assert assert_rewritten(step, *args)["sub.Tensor"] == 0


@pytest.mark.parametrize(
    "apply",
    [
        lambda w, update: w + 2 * update,
        lambda w, update: torch.add(w, update, alpha=0.5),
        lambda w, update: w - update,
        lambda w, update: w.detach().clone() + update,
        lambda w, update: (w + update, update),
    ],
    ids=["twice", "half", "taken", "of a copy", "kept"],
)
def test_other_uses_of_an_update_are_right(apply: Step) -> None:
    step, *args = updated(apply)
    assert operators(step, *args)["sub.Tensor"] >= 1
    agree(step, *args, rtol=1e-12)


def test_an_update_that_is_scaled_after_the_optimiser_is_right() -> None:
    tripled = yf.optim.GradientTransformation(
        lambda params: (), lambda updates, state, params: (updates * 3, state)
    )
    optimiser = yf.optim.chain(yf.optim.adamw(0.1), tripled)
    step, *args = updated(yf.optim.apply_updates, optimiser)
    assert operators(step, *args)["sub.Tensor"] == 1
    agree(step, *args, rtol=1e-12)


def test_a_difference_of_the_users_stays() -> None:
    def step(params: Any, batch: torch.Tensor) -> Any:
        p, q = params
        return p + (q - p), batch.sum()

    # With numbers so far apart it is no identity.
    args = (torch.full((5,), 1e20).double(), torch.ones(5).double()), X
    assert_untouched(step, *args)


# --- powers ---------------------------------------------------------------------------


def test_a_power_of_one_is_the_value() -> None:
    def step(w: torch.Tensor, batch: torch.Tensor) -> Any:
        return (batch @ w) ** 1 + (batch @ w).pow(1.0), w**1

    found = assert_rewritten(step, W, X)
    assert found["pow.Tensor_Scalar"] == 0


def test_a_cube_has_one_power_less_in_its_second_derivative() -> None:
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        slope = grad(lambda w: ((batch @ w) ** 3).sum())
        return grad(lambda w: slope(w).square().sum())(w)

    agree(step, W, X, rtol=1e-12, steps=1)


@pytest.mark.parametrize(
    "step",
    [
        lambda w, batch: (batch @ w) ** 2,
        lambda w, batch: w * (batch > 0).sum().pow(1.0).double(),
        lambda w, batch: torch.pow(1, batch @ w),
    ],
    ids=["square", "to a float", "of one"],
)
def test_other_powers_stay(step: Step) -> None:
    assert_untouched(step, W, X)


# --- expansions -----------------------------------------------------------------------


def expanded(then: Step, few: tuple[int, ...] = (1, 4)) -> Step:
    def step(w: torch.Tensor, batch: torch.Tensor) -> Any:
        rows = w.sum(0).view(few).expand(5, 4)
        return then(rows) * (batch.sum() + 1)

    return step


def length_of(step: Step, name: str) -> int:
    """How many elements an operator computes."""
    made = graph(step, W, X)
    [node] = [node for node in made.nodes if str(node.op).split(".")[1] == name]
    return made.metas[node.outputs[0].id].numel


def test_elements_are_computed_before_they_are_repeated() -> None:
    for then, name in ((torch.sin, "sin"), (lambda x: x / 48, "div")):
        step = expanded(then)
        assert length_of(step, name) == 4
        agree(step, W, X, rtol=1e-12, steps=1)


def test_a_chain_of_operators_is_computed_before_the_repetition() -> None:
    step = expanded(lambda x: (x.sin() / 3).exp())
    assert [length_of(step, name) for name in ("sin", "div", "exp")] == [4, 4, 4]
    agree(step, W, X, steps=1)


@pytest.mark.parametrize(
    "then",
    [
        lambda x: x.cumsum(0),
        lambda x: x.softmax(0),
        lambda x: x.sum(0),
        lambda x: x * torch.arange(5.0).double()[:, None],
        lambda x: x.mT.contiguous(),
        lambda x: x.clone(),
        lambda x: x * x,
        lambda x: x.view(1, 5, 4).sin(),
        lambda x: x.flip(0).cos(),
        lambda x: F.pad(x, (1, 0)).sin(),
        lambda x: x.double().sin() + x.cos(),
    ],
)
def test_other_uses_of_an_expansion_are_right(then: Step) -> None:
    agree(expanded(then), W, X, rtol=1e-12, steps=1)


def test_an_operator_with_two_results_stays_behind_the_expansion() -> None:
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(w.sum(0, keepdim=True).expand(5, 4))
        return mantissa * exponent + batch.sum()

    agree(step, W, X, steps=1)


def test_a_result_that_was_expanded_can_replace_an_argument() -> None:
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return w.mean(0, keepdim=True).expand(6, 4) * 0.5 + 0 * batch.sum()

    agree(step, W, X)
    agree(lambda w, batch: w.mean(1, keepdim=True).expand(6, 4).sin(), W, X)
    agree(lambda w, batch: w.mean(0, keepdim=True).expand(6, 4).clone(), W, X)


# --- whole steps ----------------------------------------------------------------------


def test_a_step_through_all_of_them_agrees_for_three_steps() -> None:
    optimiser = yf.optim.adamw(0.1)

    def step(w: torch.Tensor, state: Any, batch: torch.Tensor) -> Any:
        def loss(w: torch.Tensor) -> torch.Tensor:
            hidden = F.silu(batch @ w)
            penalty = grad(lambda h: F.silu(h).sum())(hidden).square().mean()
            return F.cross_entropy(hidden, LABELS) + penalty**1

        grads, value = grad_and_value(loss)(w)
        updates, state = optimiser.update(grads, state, w)
        return yf.optim.apply_updates(w, updates), state, value

    agree(step, W, optimiser.init(W), X, rtol=1e-9)
