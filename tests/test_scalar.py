"""A live float has a float's arithmetic and a float's type promotion."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import assert_same, mesh_of

import yafsdp_fn as yf
from yafsdp_fn._scalar import LiveFloat, ValueReadError

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
BINARY = ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv")
UNARY = ("neg", "abs", "pos")

numbers = st.floats(0.25, 4.0).map(lambda x: round(x, 3))
shapes = st.sampled_from([(), (1,), (3,), (2, 3), (0, 2)])


def live(value: float) -> LiveFloat:
    return LiveFloat(torch.tensor(value, dtype=torch.float64))


def assert_alike(found: Any, wanted: Any) -> None:
    """A live float stands for a float; tensors agree in dtype, shape and value."""
    if isinstance(found, LiveFloat):
        assert isinstance(wanted, float)
        assert found.tensor.dtype == torch.float64
        assert found.tensor.item() == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        return
    assert isinstance(wanted, torch.Tensor)
    assert_same(found, wanted)


def tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.full(shape, 3).to(dtype)


# --- among numbers --------------------------------------------------------------------


@given(x=numbers, y=st.one_of(numbers, st.integers(1, 5)), name=st.sampled_from(BINARY))
@settings(deadline=None)
@example(x=2.0, y=3, name="pow")
def test_arithmetic_with_numbers_is_that_of_floats(x: float, y: Any, name: str) -> None:
    op = getattr(operator, name)
    assert_alike(op(live(x), y), op(x, y))
    assert_alike(op(y, live(x)), op(y, x))
    if isinstance(y, float):
        assert_alike(op(live(x), live(y)), op(x, y))


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("x", [2.5, -2.5, 0.0])
def test_unary_operators_are_those_of_floats(name: str, x: float) -> None:
    op = getattr(operator, name)
    assert_alike(op(live(x)), op(x))


# --- among tensors --------------------------------------------------------------------


@given(
    x=numbers,
    name=st.sampled_from(("add", "sub", "mul", "truediv", "pow")),
    dtype=st.sampled_from(FLOATS + INTEGERS + COMPLEX),
    shape=shapes,
    swapped=st.booleans(),
)
@settings(deadline=None, max_examples=300)
@example(x=2.0, name="mul", dtype=torch.bool, shape=(3,), swapped=True)
@example(x=2.0, name="mul", dtype=torch.int64, shape=(), swapped=False)
@example(x=2.0, name="mul", dtype=torch.bfloat16, shape=(), swapped=True)
def test_promotion_with_a_tensor_is_that_of_floats(
    x: float, name: str, dtype: torch.dtype, shape: tuple[int, ...], swapped: bool
) -> None:
    op, other = getattr(operator, name), tensor(dtype, shape)
    try:
        wanted = op(other, x) if swapped else op(x, other)
    except RuntimeError:  # torch itself has no such operator (bool - float)
        return
    assert_alike(op(other, live(x)) if swapped else op(live(x), other), wanted)


FUNCTIONS: list[Callable[..., torch.Tensor]] = [
    lambda x, t: torch.add(t, x),
    lambda x, t: torch.mul(x, t),
    lambda x, t: torch.where(t > 1, t, x),
    lambda x, t: t * x + t / x - x,
    lambda x, t: t > x,
    lambda x, t: t == x,
    lambda x, t: (t * t * x).sum(),
    lambda x, t: t.mul(x).add(x),
    lambda x, t: (1 - x) * t + x * t.square(),
]


@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_functions_take_it_like_a_float(
    fn: Callable[..., torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    other = tensor(dtype, shape)
    assert_alike(fn(live(1.5), other), fn(1.5, other))


def test_two_dtypes_promote_as_without_it() -> None:
    low, high = tensor(torch.bfloat16, (2,)), tensor(torch.float32, (2,))
    where = torch.tensor([True, False])
    for first, second in ((low, high), (high, low)):
        wanted = torch.where(where, first * 0.5, second + 0.5)
        assert_alike(torch.where(where, first * live(0.5), second + live(0.5)), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv"])
def test_its_digits_are_not_rounded_before_the_operator(
    dtype: torch.dtype, name: str
) -> None:
    op, other = getattr(operator, name), torch.arange(1.0, 200.0).to(dtype) / 37
    for x in (0.1, 0.001234567, 3.3):
        assert torch.equal(op(other, live(x)), op(other, x))
        assert torch.equal(op(live(x), other), op(x, other))


# --- reads ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        float,
        int,
        bool,
        round,
        hash,
        "{:.2f}".format,
        lambda x: x > 0,
        lambda x: x == 0.5,
        lambda x: {x: 1},
        lambda x: 1 if x else 0,
    ],
)
def test_what_needs_the_number_says_so(read: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueReadError):
        read(live(0.5))


# --- through a step -------------------------------------------------------------------


@given(x=numbers, y=numbers, shape=shapes, dtype=st.sampled_from(FLOATS))
@settings(deadline=None, max_examples=10)
def test_a_step_with_a_live_float_agrees_with_the_plain_step(
    x: float, y: float, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    def step(params: Any, lr: float, batch: torch.Tensor) -> Any:
        decayed = lr / (1 + 2 * lr) - abs(-lr) ** 2
        return params * decayed + lr * batch.to(params.dtype).sum(), decayed

    sharded = yf.shard(step, mesh=mesh_of(2))
    params, batch = tensor(dtype, shape), torch.ones(4, 2)
    for lr in (x, y):
        assert_same(sharded(params, lr, batch), step(params, lr, batch))
    assert sharded.trace_count() == 1
