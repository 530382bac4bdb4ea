"""accumulate: the sum over parts of the batch, each spread over all ranks."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import WORLDS, agree, assert_same, mesh_of
from test_cases import labels, normal
from torch.func import grad, grad_and_value, jvp

import yafsdp_fn as yf

Fn = Callable[..., Any]
Tree = dict[str, torch.Tensor]
PARAMS = {"w": normal(5, 4), "b": normal(5)}


def batch_of(rows: int) -> Tree:
    return {"x": normal(rows, 4), "y": labels(rows)}


def loss(params: Tree, batch: Tree) -> torch.Tensor:
    """A sum over rows; the loss of a part is not linear in the part."""
    hidden = torch.tanh(batch["x"] @ params["w"].T + params["b"])
    return F.cross_entropy(hidden, batch["y"], reduction="sum")


def summed(fn: Fn, parts: int) -> Fn:
    """What accumulate means, written out."""

    def total(params: Tree, batch: Tree) -> Any:
        strided = [{k: x[i::parts] for k, x in batch.items()} for i in range(parts)]
        found = [fn(params, part) for part in strided]
        return optree.tree_map(lambda *leaves: functools.reduce(add, leaves), *found)

    return total


def add(a: Any, b: Any) -> Any:
    return a + b


def equal(found: Any, wanted: Any) -> bool:
    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# --- the value ------------------------------------------------------------------------


@settings(max_examples=50)
@given(parts=st.integers(1, 5), rows=st.integers(0, 4))
def test_it_is_the_sum_over_strided_parts(parts: int, rows: int) -> None:
    for fn in (loss, grad_and_value(loss)):
        found = yf.accumulate(fn, parts)(PARAMS, batch_of(parts * rows))
        assert equal(found, summed(fn, parts)(PARAMS, batch_of(parts * rows)))


@settings(max_examples=20)
@given(
    parts=st.integers(1, 4),
    rows=st.integers(1, 4),
    world=st.sampled_from([*WORLDS, (2, 2)]),
)
def test_sharded_it_is_the_same_for_every_batch(
    parts: int, rows: int, world: Any
) -> None:
    step = yf.accumulate(grad_and_value(loss), parts)
    found = yf.shard(step, mesh=mesh_of(world))(PARAMS, batch_of(parts * rows))
    assert_same(
        found, summed(grad_and_value(loss), parts)(PARAMS, batch_of(parts * rows))
    )


@pytest.mark.parametrize("world", [*WORLDS, (2, 2)], ids=str)
@pytest.mark.parametrize("rows", [12, 10, 2])
def test_three_steps_of_training(rows: int, world: Any) -> None:
    def step(params: Tree, batch: Tree) -> Any:
        grads, value = yf.accumulate(grad_and_value(loss), 2)(params, batch)
        return {k: p - 0.1 * grads[k] / rows for k, p in params.items()}, value / rows

    agree(step, PARAMS, batch_of(rows), world=world)


def test_the_gradient_of_the_sum_is_the_sum_of_gradients() -> None:
    total = yf.accumulate(loss, 3)
    orders = {
        "outside": lambda params, batch: grad(total)(params, batch),
        "inside": yf.accumulate(grad(loss), 3),
        "remat": lambda p, b: grad(yf.accumulate(yf.remat(loss), 3))(p, b),
        "whole": yf.remat(lambda p, b: grad(yf.remat(total))(p, b)),
    }
    wanted = grad(loss)(PARAMS, batch_of(12))
    for order in orders.values():
        assert_same(order(PARAMS, batch_of(12)), wanted)
        agree(order, PARAMS, batch_of(12), world=3, steps=1)


def test_other_transforms_and_itself_go_around_it() -> None:
    steps = {
        "jvp": lambda p, b: jvp(lambda p: yf.accumulate(loss, 2)(p, b), (p,), (p,)),
        "nested": yf.accumulate(yf.accumulate(loss, 2), 3),
    }
    wanted = {
        "jvp": jvp(lambda p: loss(p, batch_of(12)), (PARAMS,), (PARAMS,)),
        "nested": loss(PARAMS, batch_of(12)),
    }
    for name, step in steps.items():
        assert_same(step(PARAMS, batch_of(12)), wanted[name])
        agree(step, PARAMS, batch_of(12), world=2, steps=1)


def test_counts_and_trees_are_summed_leaf_by_leaf() -> None:
    def counted(params: Tree, batch: Tree) -> Any:
        right = (batch["x"] @ params["w"].T).argmax(1) == batch["y"]
        return {
            "right": right.sum(),
            "pair": (batch["x"].sum(), batch["y"].sum()),
            "n": 1,
        }

    step = yf.accumulate(counted, 4)
    wanted = counted(PARAMS, batch_of(8)) | {"n": 4}
    assert_same(step(PARAMS, batch_of(8)), wanted)
    agree(step, PARAMS, batch_of(8), world=3, steps=1)


def test_which_arguments_are_cut() -> None:
    def fn(
        batch: Any, w: torch.Tensor, *, scale: float = 2.0, other: Any = None
    ) -> Any:
        rows = 0 if other is None else other.sum()
        assert batch["kept"] == "as it is"
        return batch["x"].shape[0] * w * scale + rows

    batch, w = {"x": normal(6, 2), "kept": "as it is"}, normal(3)
    assert equal(yf.accumulate(fn, 2)(batch, w), 12 * w)
    assert equal(yf.accumulate(fn, 2)(batch, w=w, scale=1.0), 6 * w)
    both = yf.accumulate(fn, 2, batch_argnums=(0, "other"))
    assert_same(both(batch, w, other=w[:2]), 12 * w + w[:2].sum())


def test_the_batch_of_the_wrapped_function_is_that_of_the_sharded_one() -> None:
    def fn(batch: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        return (batch @ params).square().sum()

    sharded = yf.shard(yf.accumulate(fn, 2), mesh=mesh_of(2))
    assert_same(sharded(normal(8, 4), normal(4)), fn(normal(8, 4), normal(4)))
    roles = [i.role for i in sharded.trace(normal(8, 4), normal(4)).graph.inputs]
    assert roles == ["batch", "state"]


# --- the schedule ---------------------------------------------------------------------


def lowered(step: Fn, rows: int, world: Any = 4) -> yf.Lowered:
    return yf.shard(step, mesh=mesh_of(world)).lower(PARAMS, batch_of(rows))


@pytest.mark.parametrize("world", [2, 4, (2, 2)], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_gradients_are_reduced_once_and_no_row_moves(parts: int, world: Any) -> None:
    for step in (
        yf.accumulate(grad_and_value(loss), parts),
        grad_and_value(yf.accumulate(loss, parts)),
    ):
        stage = lowered(step, 12 * parts, world)
        yf.check(stage.plan)
        kinds = [t.kind for t in stage.plan.transfers() for _ in t.sources]
        assert kinds.count("reduce_scatter") == len(PARAMS)
        assert stage.cost_analysis()["unplanned_collectives"] == 0
        replicas = isinstance(world, tuple)  # once more each, and the loss on both axes
        assert kinds.count("all_reduce") == (len(PARAMS) + 2 if replicas else 1)


def test_more_parts_need_less_memory() -> None:
    peaks = [
        lowered(yf.accumulate(grad_and_value(loss), parts), 1920).memory_analysis()
        for parts in (1, 2, 4, 8)
    ]
    found = [p["peak_bytes"] - p["shard_bytes"] for p in peaks]
    assert all(b < 0.7 * a for a, b in itertools.pairwise(found)), found


def test_it_is_traced_once() -> None:
    step = yf.shard(yf.accumulate(grad(loss), 2), mesh=mesh_of(2))
    for _ in range(3):
        step(PARAMS, batch_of(8))
    assert step.trace_count() == 1


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [0, -1, True, 2.0, None, "2"])
def test_the_number_of_parts_is_a_positive_int(microbatches: Any) -> None:
    with pytest.raises(yf.ArgumentError, match=r"microbatches=.* must be an int >= 1"):
        yf.accumulate(loss, microbatches)


@pytest.mark.parametrize("shard", [lambda f: f, functools.partial(yf.shard)])
def test_rows_that_the_parts_do_not_divide_are_refused_with_their_path(
    shard: Fn,
) -> None:
    params = yf.distribute(PARAMS, mesh_of(2)) if shard(loss) is not loss else PARAMS
    with pytest.raises(yf.ArgumentError, match=r"batch\['x'\] has the shape \(8, 4\)"):
        shard(yf.accumulate(loss, 3))(params, batch_of(8))


def test_a_leaf_without_rows_is_refused_with_its_path() -> None:
    with pytest.raises(yf.ArgumentError, match=r"batch\['z'\] has the shape \(\)"):
        yf.accumulate(loss, 2)(PARAMS, batch_of(8) | {"z": torch.tensor(1.0)})


def test_a_batch_that_is_no_parameter_is_refused() -> None:
    with pytest.raises(yf.ArgumentError, match="has no parameter 'rows'"):
        yf.accumulate(loss, 2, batch_argnums="rows")
