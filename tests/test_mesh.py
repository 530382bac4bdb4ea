"""Meshes, real and emulated, and how placements cut a tensor on them."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same, mesh_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import yafsdp_fn as yf
from yafsdp_fn import _mesh
from yafsdp_fn._layout import SUM, WHOLE, Split

# --- making one -----------------------------------------------------------------------


@pytest.mark.parametrize("axes", [{"fsdp": 1}, {"dp": 4}, {"replicate": 2, "fsdp": 3}])
def test_an_emulated_mesh_has_its_axes_and_no_process_group(axes: Any) -> None:
    mesh = yf.make_mesh(emulate=True, **axes)
    assert isinstance(mesh, DeviceMesh)
    assert tuple(mesh.shape) == tuple(axes.values())
    assert mesh.mesh_dim_names == tuple(axes)
    assert mesh.device_type in ("cpu", "cuda")


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({}, "needs an axis"),
        ({"fsdp": 0}, r"fsdp=0.*int >= 1"),
        ({"fsdp": -2}, r"fsdp=-2.*int >= 1"),
        ({"fsdp": 2.0}, r"fsdp=2\.0.*int >= 1"),
        ({"fsdp": "2"}, r"fsdp='2'.*int >= 1"),
        ({"fsdp": True}, r"fsdp=True.*int >= 1"),
        ({"replicate": 2, "model": 2}, "replicate, model has none called 'fsdp'"),
    ],
)
@pytest.mark.parametrize("emulate", [True, False])
def test_axes_that_make_no_mesh_are_refused(
    axes: Any, words: str, emulate: bool
) -> None:
    running = dist.is_initialized()
    with pytest.raises(yf.ArgumentError, match=words):
        yf.make_mesh(emulate=emulate, **axes)
    assert dist.is_initialized() == running


def test_a_mesh_larger_than_the_world_is_refused() -> None:
    running = dist.is_initialized()
    try:
        with pytest.raises(yf.ArgumentError) as caught:
            yf.make_mesh(replicate=2, fsdp=4)
    finally:
        if not running:
            dist.destroy_process_group()
    message = str(caught.value)
    assert "make_mesh(replicate=2, fsdp=4) has 8 ranks, but 1 process" in message
    assert "nprocs=8" in message
    assert "emulate=True" in message


def test_emulated_meshes_of_many_sizes_beside_each_other_and_a_real_group() -> None:
    def step(params: Any, batch: torch.Tensor) -> Any:
        return params - 0.1 * (batch @ params.T).sum(0).unsqueeze(-1), batch.mean()

    sharded = yf.shard(step)
    weight, batch = torch.arange(20.0).view(5, 4), torch.arange(28.0).view(7, 4)
    real = yf.make_mesh(fsdp=1)
    try:
        meshes = [mesh_of(w) for w in (1, 3, (2, 2), 4, 1, (2, 2), 3)]
        for mesh in [*meshes, real, *meshes]:
            params = yf.distribute(weight, mesh)
            for _ in range(2):
                found = sharded(params, batch)
                assert_same(found, step(weight, batch))
        assert sharded.trace_count() == 5
        assert tuple(dist.get_process_group_ranks(real.get_group())) == (0,)
    finally:
        dist.destroy_process_group()


def test_a_real_and_an_emulated_mesh_of_one_rank_are_two_meshes() -> None:
    real = yf.make_mesh(fsdp=1)
    try:
        emulated = mesh_of(1)
        assert not _mesh.same_mesh(real, emulated)
        params = {"a": yf.distribute(torch.ones(2), real)}
        params["b"] = yf.distribute(torch.ones(2), emulated)
        with pytest.raises(yf.ArgumentError, match=r"params\['a'\].*params\['b'\]"):
            yf.shard(lambda params, batch: params["a"])(params, torch.ones(2))
    finally:
        dist.destroy_process_group()


def test_dtensors_own_communication_is_refused_on_an_emulated_mesh() -> None:
    leaf = yf.distribute(torch.ones(4, 2), mesh_of(2))
    assert isinstance(leaf, DTensor)
    assert torch.equal(leaf.full_tensor(), torch.ones(4, 2))
    with pytest.raises(yf.ArgumentError, match=r"emulated.*yf\.full"):
        leaf.redistribute(placements=[Replicate()])


def test_a_mesh_of_another_library_needs_an_axis_for_state() -> None:
    named = _mesh.offline_mesh("cpu", (2, 2), ("dp", "tp"), _mesh.EmulatedMesh)
    with pytest.raises(yf.ArgumentError, match="none is called 'fsdp'"):
        yf.distribute(torch.ones(4), named)


# --- axes -----------------------------------------------------------------------------


def test_which_axes_shard_state_and_split_the_batch() -> None:
    def axes(**sizes: int) -> tuple[int, tuple[int, ...]]:
        mesh = yf.make_mesh(emulate=True, **sizes)
        return _mesh.state_axis(mesh), _mesh.batch_axes(mesh)

    assert axes(fsdp=2) == axes(anything=2) == (0, (0,))
    assert axes(replicate=2, fsdp=2) == (1, (0, 1))
    assert axes(fsdp=2, replicate=2) == (0, (0, 1))
    assert axes(replicate=2, fsdp=2, tp=2) == (1, (0, 1))
    assert axes(tp=2, fsdp=2) == (1, (1,))


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tp": 2}, {"fsdp": 2, "replicate": 3}])
def test_a_step_on_meshes_with_other_axes(sizes: dict[str, int]) -> None:
    def step(params: Any, batch: torch.Tensor) -> Any:
        return params * batch.sum(), batch * 2

    mesh = yf.make_mesh(emulate=True, **sizes)
    weight, batch = torch.arange(10.0).view(5, 2), torch.arange(7.0)
    found = yf.shard(step)(yf.distribute(weight, mesh), batch)
    assert_same(found, step(weight, batch))


# --- placements -----------------------------------------------------------------------

axis_sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=3), sizes=axis_sizes)
@settings(deadline=None)
def test_the_parts_of_a_split_cover_a_tensor_once(
    shape: list[int], sizes: tuple[int, ...]
) -> None:
    placed = _mesh.split_on(shape, range(len(sizes)), sizes)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    at = itertools.product(*map(range, sizes))
    parts = [_mesh.part_of(whole, placed, c) for c in at]
    assert torch.equal(torch.cat(parts), whole)
    assert sum(part.numel() for part in parts) == whole.numel()


@given(rows=st.integers(0, 12), ranks=st.integers(1, 5))
def test_one_axis_is_cut_as_torch_chunks(rows: int, ranks: int) -> None:
    whole = torch.arange(rows)
    placed = _mesh.split_on((rows,), (0,), (ranks,))
    parts = [_mesh.part_of(whole, placed, (rank,)) for rank in range(ranks)]
    wanted = list(whole.chunk(ranks))
    wanted += [whole[:0]] * (ranks - len(wanted))
    for part, chunk in zip(parts, wanted, strict=True):
        assert torch.equal(part, chunk)


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(0), Shard(0)),
        (Replicate(), Replicate()),
    ],
)
def test_placements_go_there_and_back(placements: Any) -> None:
    ours = _mesh.from_torch(placements, (8, 6), (2, 2), "leaf")
    assert _mesh.to_torch(ours, (8, 6), (2, 2)) == placements


def test_placements_are_read_as_they_mean() -> None:
    def ours(*placements: Any, shape: Any = (10, 6), sizes: Any = (2, 2)) -> Any:
        return _mesh.from_torch(placements, shape, sizes, "leaf")

    assert ours(Shard(-1), Partial()) == (Split(1, 3), SUM)
    assert ours(Shard(0), Replicate()) == (Split(0, 5), WHOLE)
    assert ours(Shard(0), Shard(1), sizes=(1, 2)) == (WHOLE, Split(1, 3))
    with pytest.raises(yf.ArgumentError, match=r"leaf: dimension 0 of length 10"):
        ours(Shard(0), Shard(0))
    with pytest.raises(yf.ArgumentError, match=r"leaf has the placement P"):
        ours(Partial("avg"), Replicate())


def test_placements_that_dtensor_cannot_say() -> None:
    assert _mesh.to_torch((Split(0, 5),), (10,), (4,)) is None
    assert _mesh.to_torch((Split(0, 5), Split(0, 3)), (10,), (2, 2)) is None
    assert _mesh.to_torch((SUM,), (10,), (2,)) is None
