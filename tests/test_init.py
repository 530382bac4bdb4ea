"""init: the values of the initialiser, in shards, and never more than a leaf."""

from typing import Any
from unittest import mock

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import mesh_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import yafsdp_fn as yf
from yafsdp_fn import _init
from yafsdp_fn.testing import meshes

Tree = Any
WORLDS = (1, 2, 3, 4, (2, 2))
KEY = yf.random.key(3)
OPTIMISER = yf.optim.adamw(0.1)


def make(key: torch.Tensor, scale: float = 0.02) -> Tree:
    """Leaves that are made by their rows, and some that are not; several blocks."""
    keys = yf.random.split(key, 6)
    params = {
        "large": scale * yf.random.normal(keys[0], (1000, 700)),
        "turned": yf.random.uniform(keys[1], (300, 1000)).t(),
        "orthogonal": torch.linalg.qr(yf.random.normal(keys[2], (30, 20)))[0],
        "unit": (lambda w: w / w.norm())(yf.random.normal(keys[3], (600, 500))),
        "kept": yf.random.bernoulli(keys[4], 0.5, (9,)),
        "gain": torch.ones(7),
        "scale": torch.tensor(1.5),
        "positions": torch.arange(5),
        "odd": yf.random.normal(keys[5], (5, 3), dtype=torch.float64),
    }
    return params, OPTIMISER.init(params), 3


def assert_bits(found: Tree, wanted: Tree) -> None:
    rows = zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True)
    for mine, theirs in rows:
        assert type(mine) is type(theirs)
        if isinstance(mine, torch.Tensor):
            assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())
            assert torch.equal(mine, theirs)


def test_every_mesh_has_the_same_bits_placed_by_default() -> None:
    first = yf.full(yf.init(make, mesh_of(1))(KEY))
    plain = make(KEY)
    torch.testing.assert_close(first, plain)
    exact = ("large", "turned", "kept", "gain", "positions", "odd")
    assert_bits([first[0][k] for k in exact], [plain[0][k] for k in exact])
    for world in WORLDS:
        made = yf.init(make, mesh_of(world))(KEY)
        assert_bits(yf.full(made), first)
        placed = yf.distribute(plain, mesh_of(world))
        rows = zip(optree.tree_leaves(made), optree.tree_leaves(placed), strict=True)
        for mine, theirs in rows:
            assert isinstance(mine, DTensor) == isinstance(theirs, DTensor)
            assert not isinstance(mine, DTensor) or mine.placements == theirs.placements


def test_placements_and_arguments_are_the_users() -> None:
    mesh = mesh_of((2, 2))
    for placements in (
        [Shard(0), Shard(1)],
        [Replicate(), Shard(1)],
        [Shard(1), Shard(0)],
    ):
        made = yf.init(
            lambda key, scale: make(key, scale)[0]["large"], mesh, placements
        )(KEY, scale=2.0)
        assert list(made.placements) == placements
        assert_bits(yf.full(made), make(KEY, 2.0)[0]["large"])
    assert_bits(yf.full(yf.init(lambda: torch.ones(5), mesh)()), torch.ones(5))


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_state_of_an_optimiser_lies_as_its_parameters(world: Any) -> None:
    mesh = mesh_of(world)
    plain = {"a": {"w": torch.ones(6, 4)}, "b": torch.ones(3), "c": torch.tensor(2.0)}

    def choose(path: str, leaf: torch.Tensor) -> Any:
        return [Shard(1) if "w" in path else Replicate()] * mesh.ndim

    params = yf.distribute(plain, mesh, None if mesh.ndim > 1 else choose)
    made, wanted = yf.init(OPTIMISER.init, mesh)(params), OPTIMISER.init(params)
    assert_bits(yf.full(made), yf.full(wanted))
    for mine, theirs in zip(
        made.first_moment["a"].values(), params["a"].values(), strict=True
    ):
        assert mine.placements == theirs.placements

    def average(params: Tree) -> Tree:
        return {
            "average": params,
            "sum": params["a"]["w"].sum(0),
            "n": torch.ones(4, 2),
        }

    made = yf.init(average, mesh)(params)
    assert_bits(yf.full(made), average(plain))
    assert made["average"]["a"]["w"].placements == params["a"]["w"].placements
    step = yf.shard(lambda p, batch: p + batch.sum(), donate_argnums=0)
    step(made["average"]["a"]["w"], torch.ones(1))
    assert_bits(yf.full(params), plain)  # it was a copy


@settings(max_examples=settings().max_examples // 10)
@given(mesh=meshes(), block=st.integers(1, 300))
def test_rows_of_any_number_are_made(mesh: DeviceMesh, block: int) -> None:
    def some(key: torch.Tensor) -> Tree:
        shapes = [(7, 6), (), (0, 3), (2, 30), (2, 3, 4)]
        return [yf.random.normal(key, shape) for shape in shapes]

    with mock.patch.object(_init, "_BLOCK_BYTES", block):
        assert_bits(yf.full(yf.init(some, mesh)(KEY)), some(KEY))


class Largest(TorchDispatchMode):
    """The largest storage that an operator has made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in optree.tree_leaves(out):
            if type(leaf) is torch.Tensor and not leaf.is_meta:  # not a fake one
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return out


def test_nothing_as_large_as_a_leaf_is_made() -> None:
    """A leaf of 32 MB on 16 ranks: shards of 2 MB, and the memory of a block."""
    shape = (8192, 1024)
    initialise = yf.init(lambda key: yf.random.normal(key, shape), mesh_of(16))
    with Largest() as largest:
        made = initialise(KEY)
    assert largest.nbytes < 4 * 8192 * 1024 / 2
    assert_bits(yf.full(made)[:2], yf.random.normal(KEY, shape)[:2])


def test_a_wide_row_is_made_in_parts_too() -> None:
    initialise = yf.init(lambda key: yf.random.normal(key, (1, 1 << 23)), mesh_of(2))
    with Largest() as largest:
        made = initialise(KEY)
    assert largest.nbytes <= 4 << 23  # the shard of the rank that holds the row
    assert_bits(yf.full(made)[:, -9:], yf.random.normal(KEY, (1, 1 << 23))[:, -9:])


def test_shapes_are_known_without_computing() -> None:
    with Largest() as largest:
        shapes = yf.eval_shape(make, KEY)
    assert largest.nbytes < 1000
    for shape, leaf in zip(
        optree.tree_leaves(shapes), optree.tree_leaves(make(KEY)), strict=True
    ):
        assert type(shape) is type(leaf)
        if isinstance(leaf, torch.Tensor):
            assert shape.is_meta
            assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
            assert shape.stride() == leaf.stride()


def test_what_is_no_initialiser_is_refused() -> None:
    with pytest.raises(yf.TraceError, match="draws random numbers from a global"):
        yf.init(lambda: torch.randn(3), mesh_of(2))()
    params = yf.distribute({"w": torch.ones(4)}, mesh_of(2))
    with pytest.raises(yf.ArgumentError, match=r"lie on .*fsdp=2.*, but init is for"):
        yf.init(OPTIMISER.init, mesh_of(3))(params)
    with pytest.raises(yf.TraceError, match="value"):
        yf.init(lambda key: torch.ones(int(key.sum())), mesh_of(2))(KEY)
    with pytest.raises(yf.TraceError, match="global generator"):
        yf.eval_shape(lambda: torch.rand(2))
