"""What each argument of a step is: state, batch, static, live float, or donated."""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import assert_same, mesh_of
from torch.distributed.tensor import DTensor

import yafsdp_fn as yf

Step = Callable[..., Any]

WEIGHT = torch.arange(12.0).view(6, 2)
BATCH = torch.arange(8.0).view(4, 2)


def combine(weight: Any, batch: Any, extra: Any = None) -> Any:
    """`[6, 2]` and `[4, 2]`; does not say which of them is the batch."""
    return weight * batch.sum() if extra is None else weight * batch.sum() * extra


def roles(step: Any, *args: Any) -> dict[str, str]:
    """The role of every leaf of the arguments, by path."""
    inputs = step.trace(*args).graph.inputs
    return {entry.path: entry.role for entry in inputs}


# --- which is the batch ---------------------------------------------------------------


def test_the_batch_is_the_parameter_of_that_name_else_the_last() -> None:
    def named(batch: Any, params: Any) -> Any:
        return params * batch.sum()

    def last(params: Any, data: Any) -> Any:
        return params * data.sum()

    def last_but_static(params: Any, data: Any, flag: Any) -> Any:
        return params * data.sum()

    mesh = mesh_of(2)
    assert roles(yf.shard(named, mesh=mesh), BATCH, WEIGHT)["batch"] == "batch"
    assert roles(yf.shard(named, mesh=mesh), BATCH, WEIGHT)["params"] == "state"
    assert roles(yf.shard(last, mesh=mesh), WEIGHT, BATCH)["data"] == "batch"
    flagged = yf.shard(last_but_static, mesh=mesh, static_argnames="flag")
    assert roles(flagged, WEIGHT, BATCH, True)["data"] == "batch"


@pytest.mark.parametrize(
    "options",
    [
        {"batch_argnums": 1},
        {"batch_argnums": (1,)},
        {"batch_argnums": [-1]},
        {"batch_argnames": "x"},
        {"batch_argnames": ("x",)},
        {"batch_argnums": 1, "batch_argnames": ["x"]},
    ],
)
def test_the_batch_is_chosen_by_position_or_name(options: dict[str, Any]) -> None:
    def step(params: Any, x: Any) -> Any:
        return params * x.sum()

    sharded = yf.shard(step, mesh=mesh_of(2), **options)
    assert roles(sharded, WEIGHT, BATCH) == {"params": "state", "x": "batch"}
    assert_same(sharded(WEIGHT, BATCH), step(WEIGHT, BATCH))


def test_several_arguments_or_none_are_the_batch() -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        return params * (x * y).sum()

    both = yf.shard(step, mesh=mesh_of(3), batch_argnums=(1, 2))
    assert roles(both, WEIGHT, BATCH, BATCH)["x"] == "batch"
    none = yf.shard(step, mesh=mesh_of(3), batch_argnums=())
    assert set(roles(none, WEIGHT, BATCH, BATCH).values()) == {"state"}
    for sharded in (both, none):
        assert_same(sharded(WEIGHT, BATCH, BATCH), step(WEIGHT, BATCH, BATCH))


@pytest.mark.parametrize("option", ["batch", "static", "donate"])
@pytest.mark.parametrize("bad", [2, -3, "weights", (0, "nothing")])
def test_a_parameter_that_is_not_there_is_refused(option: str, bad: Any) -> None:
    def step(params: Any, batch: Any) -> Any:
        return params * batch.sum()

    first = bad[-1] if isinstance(bad, tuple) else bad
    with pytest.raises(yf.ArgumentError) as caught:
        yf.shard(step, **{f"{option}_argnums": bad})
    message = str(caught.value)
    assert message.startswith(f"{option}: ")
    assert repr(first) in message
    assert "0 'params', 1 'batch'" in message


@pytest.mark.parametrize("option", ["batch", "donate"])
def test_an_argument_is_not_static_and_something_else(option: str) -> None:
    with pytest.raises(yf.ArgumentError, match=f"'weight'.*static.*{option}"):
        yf.shard(combine, static_argnums=0, **{f"{option}_argnames": "weight"})


def test_shard_of_no_function_is_refused() -> None:
    mesh: Any = mesh_of(2)
    with pytest.raises(yf.ArgumentError, match=r"takes a function.*@yf.shard\(mesh="):
        yf.shard(mesh)


# --- how a call binds -----------------------------------------------------------------


def test_keywords_and_positions_are_the_same_call() -> None:
    step = yf.shard(combine, mesh=mesh_of(2))
    wanted = combine(WEIGHT, BATCH)
    assert_same(step(WEIGHT, BATCH), wanted)
    assert_same(step(WEIGHT, batch=BATCH), wanted)
    assert_same(step(batch=BATCH, weight=WEIGHT), wanted)
    assert_same(step(WEIGHT, BATCH, None), wanted)
    assert (step.trace_count(), step.cache_size()) == (1, 1)


def test_keyword_only_parameters_and_defaults() -> None:
    def step(params: Any, batch: Any, *, lr: float = 0.5, power: int = 2) -> Any:
        return params * lr * batch.sum() ** power

    sharded = yf.shard(step, mesh=mesh_of(2))
    assert_same(sharded(WEIGHT, BATCH), step(WEIGHT, BATCH))
    assert_same(sharded(WEIGHT, BATCH, lr=0.25), step(WEIGHT, BATCH, lr=0.25))
    assert sharded.trace_count() == 1
    assert_same(sharded(WEIGHT, BATCH, power=3), step(WEIGHT, BATCH, power=3))
    assert sharded.trace_count() == 2


def test_variadic_parameters_are_trees() -> None:
    def step(batch: Any, *layers: Any, **options: Any) -> Any:
        total = sum(layer.sum() for layer in layers)
        return options["bias"] * total * batch.sum()

    sharded = yf.shard(step, mesh=mesh_of(2))
    bias = torch.ones(3)
    found = sharded(BATCH, WEIGHT, WEIGHT * 2, bias=bias)
    assert_same(found, step(BATCH, WEIGHT, WEIGHT * 2, bias=bias))
    inputs = sharded.trace(BATCH, WEIGHT, WEIGHT, bias=bias).graph.inputs
    paths = {entry.path: entry.role for entry in inputs}
    assert paths["batch"] == "batch"
    assert paths["layers[1]"] == paths["options['bias']"] == "state"


def test_wrong_calls_fail_as_in_python() -> None:
    step = yf.shard(combine, mesh=mesh_of(2))
    with pytest.raises(TypeError, match="missing a required argument: 'batch'"):
        step(WEIGHT)
    with pytest.raises(TypeError, match="unexpected keyword argument 'lr'"):
        step(WEIGHT, BATCH, lr=1.0)


def test_partials_methods_and_lambdas_are_functions() -> None:
    class Trainer:
        rate = 2.0

        def step(self, params: Any, batch: Any) -> Any:
            return params * batch.sum() * self.rate

    for fn in (
        functools.partial(combine, extra=2.0),
        Trainer().step,
        lambda params, batch: params * batch.sum() * 2.0,
    ):
        sharded = yf.shard(fn, mesh=mesh_of(2))
        assert_same(sharded(WEIGHT, BATCH), combine(WEIGHT, BATCH, 2.0))


# --- static values --------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Options:
    power: int


def test_static_arguments_are_part_of_the_program() -> None:
    def step(params: Any, batch: Any, options: Options) -> Any:
        return params * batch.sum() ** options.power

    sharded = yf.shard(step, mesh=mesh_of(2), static_argnums=2)
    for options, traces in ((Options(2), 1), (Options(2), 1), (Options(3), 2)):
        found = sharded(WEIGHT, BATCH, options)
        assert_same(found, step(WEIGHT, BATCH, options))
        assert sharded.trace_count() == traces


def test_leaves_that_are_neither_tensor_nor_float_are_static() -> None:
    def step(state: Any, batch: Any) -> Any:
        power = state["power"] if state["mode"] == "power" and state["on"] else 1
        return state["w"] * batch.sum() ** power + (state["colour"] is Colour.BLUE)

    sharded = yf.shard(step, mesh=mesh_of(2))
    base = {"w": WEIGHT, "power": 2, "mode": "power", "on": True, "colour": Colour.RED}
    changes: list[dict[str, Any]] = [
        {},
        {"power": 3},
        {"mode": "none"},
        {"on": False},
        {"colour": Colour.BLUE},
    ]
    for traces, change in enumerate(changes, start=1):
        for _ in range(2):
            assert_same(sharded(base | change, BATCH), step(base | change, BATCH))
            assert sharded.trace_count() == traces


def test_static_values_of_other_types_are_other_programs() -> None:
    def step(params: Any, batch: Any, flag: Any) -> Any:
        return params * batch.sum() * (3 if flag is True else 5)

    sharded = yf.shard(step, mesh=mesh_of(2), batch_argnames="batch")
    static = yf.shard(
        step, mesh=mesh_of(2), batch_argnames="batch", static_argnames="flag"
    )
    for fn in (sharded, static):
        for flag in (1, True, 1, 1.0):
            assert_same(fn(WEIGHT, BATCH, flag), step(WEIGHT, BATCH, flag))


def test_a_static_float_is_traced_for_each_value() -> None:
    def step(params: Any, batch: Any, lr: float) -> Any:
        return params * (2.0 if lr > 0.5 else 3.0) * batch.sum()

    sharded = yf.shard(step, mesh=mesh_of(2), static_argnames="lr")
    for lr, traces in ((0.1, 1), (0.9, 2), (0.1, 2)):
        assert_same(sharded(WEIGHT, BATCH, lr), step(WEIGHT, BATCH, lr))
        assert sharded.trace_count() == traces


def test_a_leaf_that_cannot_be_hashed_is_named() -> None:
    sharded = yf.shard(lambda params, batch: params["w"] * 2, mesh=mesh_of(2))
    tree = {"w": WEIGHT, "data": [np.ones(3)]}
    with pytest.raises(yf.ArgumentError) as caught:
        sharded(tree, BATCH)
    message = str(caught.value)
    assert message.startswith("params['data'][0] is a numpy.ndarray")
    assert "torch.as_tensor" in message
    assert "register_pytree_node" in message


def test_a_static_argument_that_cannot_be_hashed_is_named() -> None:
    sharded = yf.shard(combine, mesh=mesh_of(2), static_argnames="extra")
    with pytest.raises(yf.ArgumentError, match=r"^extra is a builtins\.dict"):
        sharded(WEIGHT, BATCH, {"lr": 1})


# --- floats ---------------------------------------------------------------------------


def test_a_float_is_live() -> None:
    def step(params: Any, lr: float, batch: Any) -> Any:
        return params - lr * batch.sum()

    sharded = yf.shard(step, mesh=mesh_of(2))
    for lr in (0.1, 0.01, 0.0, -3.0, float("inf")):
        assert_same(sharded(WEIGHT, lr, BATCH), step(WEIGHT, lr, BATCH))
    assert (sharded.trace_count(), sharded.cache_size()) == (1, 1)


def test_floats_inside_of_trees_and_batches_are_live() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state["w"] * state["lr"][0] * batch["scale"] * batch["x"].sum()

    sharded = yf.shard(step, mesh=mesh_of(2))
    for lr, scale in ((0.1, 2.0), (0.01, 3.0)):
        args = ({"w": WEIGHT, "lr": [lr]}, {"x": BATCH, "scale": scale})
        assert_same(sharded(*args), step(*args))
    assert sharded.trace_count() == 1


def test_an_int_is_no_float() -> None:
    def step(params: Any, lr: Any, batch: Any) -> Any:
        return params * lr * batch.sum()

    sharded = yf.shard(step, mesh=mesh_of(2))
    for lr, traces in ((2.0, 1), (2, 2), (3.0, 2), (3, 3)):
        assert_same(sharded(WEIGHT, lr, BATCH), step(WEIGHT, lr, BATCH))
        assert sharded.trace_count() == traces


def reads_by_sqrt(params: Any, lr: float, batch: Any) -> Any:
    return params * math.sqrt(lr)


def reads_by_if(params: Any, lr: float, batch: Any) -> Any:
    return params * lr if lr > 0.05 else params + batch.sum()


def reads_by_full(params: Any, lr: float, batch: Any) -> Any:
    return params * torch.full((), lr)


def reads_by_alpha(params: Any, lr: float, batch: Any) -> Any:
    return torch.add(params, params, alpha=lr)


def reads_by_tensor(params: Any, lr: float, batch: Any) -> Any:
    return params * torch.tensor(lr)


def reads_by_as_tensor(params: Any, lr: float, batch: Any) -> Any:
    return params * torch.as_tensor(lr, dtype=torch.float32)


def reads_by_numbers(params: Any, lr: float, batch: Any) -> Any:
    return params * max(lr, 0.05) * round(lr, 1) * int(10 * lr)


def reads_by_linspace(params: Any, lr: float, batch: Any) -> Any:
    return params * torch.linspace(0, lr, 2)


def reads_by_clamp(params: Any, lr: float, batch: Any) -> Any:
    return params.clamp(max=lr)


def reads_by_type(params: Any, lr: float, batch: Any) -> Any:
    return params * (lr if isinstance(lr, float) else 1e6)


def reads_by_addcmul(params: Any, lr: float, batch: Any) -> Any:
    return torch.addcmul(params, params, params, value=lr)


def reads_by_list(params: Any, lr: float, batch: Any) -> Any:
    return params * torch.tensor([lr, 2 * lr])


READS = [value for name, value in list(globals().items()) if name.startswith("reads_")]


@pytest.mark.parametrize("step", READS)
def test_a_float_that_is_read_is_never_stale(step: Step) -> None:
    sharded = yf.shard(step, mesh=mesh_of(2))
    for lr in (0.1, 0.01, 0.1, 0.2):
        assert_same(sharded(WEIGHT, lr, BATCH), step(WEIGHT, lr, BATCH))
    # Nothing is traced for a value that was seen before.
    assert sharded.trace_count() <= 4
    assert sharded.cache_size() <= 3


def test_nan_is_a_value_like_another() -> None:
    sharded = yf.shard(reads_by_sqrt, mesh=mesh_of(2))
    for _ in range(2):
        found = sharded(WEIGHT, math.nan, BATCH)
        assert torch.isnan(yf.full(found)).all()
    assert sharded.cache_size() == 1


# --- donation by position and name ----------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"donate_argnums": 0},
        {"donate_argnums": (0,)},
        {"donate_argnums": -2},
        {"donate_argnames": "params"},
        {"donate_argnames": ["params"]},
    ],
)
def test_an_argument_is_donated_by_position_or_name(options: dict[str, Any]) -> None:
    def step(params: Any, batch: Any) -> Any:
        return params * batch.sum()

    mesh = mesh_of(2)
    sharded = yf.shard(step, **options)
    params = yf.distribute(WEIGHT, mesh)
    made = sharded(params, BATCH)
    assert isinstance(made, DTensor)
    assert_same(made, step(WEIGHT, BATCH))
    with pytest.raises(yf.DonatedError):
        sharded(params, BATCH)


class Settings:
    """A user's own object, which holds a tensor."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.power = weight, 2


def test_tensors_inside_of_a_static_argument_are_never_stale() -> None:
    def step(params: Any, settings: Settings, batch: torch.Tensor) -> Any:
        return params * settings.weight**settings.power + batch.sum()

    params, batch = torch.ones(5, 4), torch.ones(8, 4)
    settings = Settings(torch.full((4,), 3.0))
    sharded = yf.shard(step, mesh=mesh_of(3))
    assert_same(sharded(params, settings, batch), step(params, settings, batch))
    settings.weight = torch.full((4,), 5.0)
    assert_same(sharded(params, settings, batch), step(params, settings, batch))
    assert sharded.trace_count() == 1
    settings.power = 3
    assert_same(sharded(params, settings, batch), step(params, settings, batch))
