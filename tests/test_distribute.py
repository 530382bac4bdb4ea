"""Full tensors to shards and back, and the rows of ranks to a global batch."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import MESHES, WORLDS, assert_same, mesh_of
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import yafsdp_fn as yf
from yafsdp_fn._torch import LocalTensor, make_dtensor

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.bool,
)

worlds = st.sampled_from([*WORLDS, *MESHES])


class Pair(NamedTuple):
    first: Any
    second: Any


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape).to(dtype)


def local_shapes(leaf: Any) -> list[tuple[int, ...]]:
    return [tuple(part.shape) for part in leaf.to_local()._local_tensors.values()]


# --- there and back -------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    world=worlds,
)
@settings(deadline=None, max_examples=200)
def test_full_is_the_inverse_of_distribute(
    shape: tuple[int, ...], dtype: torch.dtype, world: Any
) -> None:
    whole = filled(shape, dtype)
    placed = yf.distribute([whole], mesh_of(world))
    assert isinstance(placed[0], DTensor)
    assert placed[0].shape == whole.shape
    assert placed[0].stride() == whole.stride()
    back = yf.full(placed)[0]
    assert type(back) is torch.Tensor
    assert back.dtype == dtype
    assert torch.equal(back, whole)


@pytest.mark.parametrize(
    "leaf",
    [
        filled((6, 4), torch.float32).t(),
        filled((2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last),
        filled((4, 6), torch.float32)[:, ::2],
        torch.ones(1).expand(5, 3),
    ],
)
def test_strides_are_those_of_torch(leaf: torch.Tensor) -> None:
    back = yf.full(yf.distribute(leaf, mesh_of(3)))
    assert torch.equal(back, leaf)
    assert back.stride() == torch.empty_like(leaf).stride()


def test_trees_keep_what_is_no_tensor() -> None:
    tree = {"a": Pair(torch.ones(3), None), "b": [1, "x", 2.5], "c": ()}
    placed = yf.distribute(tree, mesh_of(2))
    assert isinstance(placed["a"].first, DTensor)
    assert placed["a"].second is None
    assert placed["b"] == [1, "x", 2.5]
    assert_same(placed, tree)
    assert_same(yf.full(tree), tree)


def test_distributing_copies() -> None:
    whole = torch.ones(4, 2)
    placed = yf.distribute({"w": whole}, mesh_of(2))
    whole.zero_()
    assert torch.equal(yf.full(placed)["w"], torch.ones(4, 2))


# --- placements -----------------------------------------------------------------------


def test_defaults_shard_floats_and_replicate_the_rest() -> None:
    tree = {
        "w": torch.ones(10, 3),
        "scalar": torch.tensor(1.0),
        "count": torch.ones(4, dtype=torch.int64),
        "mask": torch.ones(4, dtype=torch.bool),
    }
    placed = yf.distribute(tree, mesh_of(4))
    assert placed["w"].placements == (Shard(0),)
    assert local_shapes(placed["w"]) == [(3, 3), (3, 3), (3, 3), (1, 3)]
    for name in ("scalar", "count", "mask"):
        assert placed[name].placements == (Replicate(),)
    two = yf.distribute(tree, mesh_of((2, 2)))
    assert two["w"].placements == (Replicate(), Shard(0))


def test_fewer_rows_than_ranks() -> None:
    placed = yf.distribute(filled((1, 6), torch.float32), mesh_of(4))
    assert local_shapes(placed) == [(1, 6), (0, 6), (0, 6), (0, 6)]


@pytest.mark.parametrize(
    "placements", [(Shard(1),), (Replicate(),), (Shard(-1),), [Shard(0)]]
)
def test_one_placement_for_all(placements: Any) -> None:
    tree = {"a": filled((4, 6), torch.float32), "b": filled((3, 2), torch.int64)}
    placed = yf.distribute(tree, mesh_of(3), placements)
    assert_same(placed, tree)
    for leaf in placed.values():
        (found,) = leaf.placements
        assert found.is_replicate() == placements[0].is_replicate()


def test_a_function_chooses_placements_by_path() -> None:
    tree = {"layers": [torch.ones(4, 6)], "bias": torch.ones(4)}
    paths = {}

    def choose(path: str, leaf: torch.Tensor) -> Any:
        paths[path] = tuple(leaf.shape)
        return (Shard(1),) if leaf.dim() == 2 else None

    placed = yf.distribute(tree, mesh_of(2), choose)
    assert placed["layers"][0].placements == (Shard(1),)
    assert placed["bias"].placements == (Shard(0),)
    assert paths == {"tree['layers'][0]": (4, 6), "tree['bias']": (4,)}


@pytest.mark.parametrize(
    ("placements", "world", "words"),
    [
        ((Shard(0), Shard(0)), 2, r"tree\['w'\]: 2 placements.*one for each axis"),
        ((Shard(2),), 2, r"tree\['w'\] of shape \(5, 4\) has no dimension 2"),
        ((Shard(-3),), 2, r"tree\['w'\] of shape \(5, 4\) has no dimension -3"),
        ((Partial(),), 2, r"tree\['w'\]: a full tensor cannot be distributed as"),
        ((Shard(0), Shard(0)), (2, 2), r"tree\['w'\]: dimension 0 of length 5"),
    ],
)
def test_placements_that_do_not_fit_are_refused(
    placements: Any, world: Any, words: str
) -> None:
    with pytest.raises(yf.ArgumentError, match=words):
        yf.distribute({"w": torch.ones(5, 4)}, mesh_of(world), placements)


def test_what_is_distributed_is_not_distributed_again() -> None:
    placed = yf.distribute({"w": torch.ones(4)}, mesh_of(2))
    with pytest.raises(yf.ArgumentError, match=r"tree\['w'\] is a DTensor.*yf\.full"):
        yf.distribute(placed, mesh_of(4))
    moved = yf.distribute(yf.full(placed), mesh_of(4))
    assert_same(moved, {"w": torch.ones(4)})


def test_the_full_value_of_a_donated_tree_is_refused() -> None:
    params = yf.distribute({"w": torch.ones(4)}, mesh_of(2))
    step = yf.shard(lambda params, batch: {"w": params["w"] * 2}, donate_argnums=0)
    step(params, torch.ones(2))
    with pytest.raises(yf.DonatedError, match=r"tree\['w'\] was donated as params"):
        yf.full(params)


# --- pending sums ---------------------------------------------------------------------


def pending(mesh: Any, *parts: torch.Tensor) -> DTensor:
    """A DTensor whose value is the sum of what the emulated ranks hold."""
    local = LocalTensor(dict(enumerate(parts)))
    like = yf.distribute(parts[0], mesh, (Replicate(),))
    return make_dtensor(
        local, mesh, (Partial(),), parts[0].shape, parts[0].stride(), type(like)
    )


def test_a_pending_sum_is_its_sum() -> None:
    mesh = mesh_of(3)
    parts = [filled((4, 2), torch.float64) * rank for rank in (1, 10, 100)]
    summed = pending(mesh, *parts)
    assert_same(yf.full(summed), sum(parts))


def test_a_step_takes_a_pending_sum_as_an_argument() -> None:
    def step(params: Any, other: Any, batch: torch.Tensor) -> Any:
        return params["w"].square() * batch.sum(), params["w"] * 2, other + 1

    parts = [filled((4, 2), torch.float64) * rank for rank in (1, 10, 100)]
    batch = torch.arange(5.0, dtype=torch.float64)
    mesh = mesh_of(3)
    tree = {"w": pending(mesh, *parts)}
    found = yf.shard(step)(tree, pending(mesh, *parts), batch)
    assert_same(found, step({"w": sum(parts)}, sum(parts), batch))
    assert_same(tree, {"w": sum(parts)})


# --- rows of the ranks ----------------------------------------------------------------


@pytest.mark.parametrize(
    "counts", [(2, 2, 2), (3, 3, 1), (1, 5, 1), (0, 4, 0), (1, 0, 6), (0, 0, 0)]
)
def test_rows_of_ranks_become_one_batch(counts: tuple[int, ...]) -> None:
    mesh = mesh_of(3)
    rows = [{"x": torch.full((n, 2), rank + 0.5)} for rank, n in enumerate(counts)]
    batch = yf.from_local(rows, mesh)
    whole = {"x": torch.cat([part["x"] for part in rows])}
    assert isinstance(batch["x"], DTensor)
    assert batch["x"].placements == (Shard(0),)
    assert_same(batch, whole)
    found = yf.shard(lambda batch: batch["x"] * 2 + batch["x"].sum())(batch)
    assert_same(found, whole["x"] * 2 + whole["x"].sum())


@pytest.mark.parametrize("counts", [(2, 2, 2, 2), (3, 2, 3, 2), (1, 2, 3, 4)])
def test_rows_follow_the_order_of_ranks_on_two_axes(counts: tuple[int, ...]) -> None:
    rows = [torch.full((n, 2), float(rank)) for rank, n in enumerate(counts)]
    batch = yf.from_local(rows, mesh_of((2, 2)))
    assert_same(batch, torch.cat(rows))
    step = yf.shard(lambda batch: batch * 2, mesh=mesh_of((2, 2)))
    assert_same(step(batch), torch.cat(rows) * 2)


def test_rows_are_not_multiplied_by_an_axis_that_does_not_split_them() -> None:
    mesh = yf.make_mesh(emulate=True, fsdp=2, tp=2)
    rows = [torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(1, 3), torch.ones(1, 3)]
    assert_same(yf.from_local(rows, mesh), torch.cat([rows[0], rows[2]]))


def test_a_local_batch_and_a_global_one_share_a_program() -> None:
    mesh = mesh_of(2)
    step = yf.shard(lambda params, batch: (params * batch.sum(), batch.mean()))
    params = yf.distribute(torch.ones(3), mesh)
    rows = [torch.ones(3, 2), torch.zeros(2, 2)]
    step(params, torch.cat(rows))
    assert_same(step(params, yf.from_local(rows, mesh))[1], torch.cat(rows).mean())
    assert step.trace_count() == 1


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (torch.ones(4), "a list of 2 trees"),
        ([torch.ones(4)], "a list of 2 trees"),
        ([torch.tensor(1.0)] * 2, r"tree is a Tensor of shape \(\)"),
        ([{"n": 3}] * 2, r"tree\['n'\] is a int"),
        ([{"n": torch.ones(2)}, {"m": torch.ones(2)}], "different structures"),
        ([torch.ones(2, 3), torch.ones(2, 4)], "tree"),
        ([torch.ones(2), torch.ones(2, dtype=torch.int64)], "tree"),
    ],
)
def test_rows_that_make_no_batch_are_refused(tree: Any, words: str) -> None:
    with pytest.raises(yf.ArgumentError, match=words):
        yf.from_local(tree, mesh_of(2))
