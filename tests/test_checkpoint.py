"""Checkpoints: bit for bit at every mesh, whole or not at all, clear when damaged."""

import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import llama, mesh_of
from test_cases import normal
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import yafsdp_fn as yf
from yafsdp_fn import _pieces
from yafsdp_fn.checkpoint import _save
from yafsdp_fn.testing import meshes, trees

Tree = Any
WORLDS = (1, 2, 3, 4, (2, 2))


class Moments(NamedTuple):
    mean: Any
    square: Any
    unused: Any = None


def state() -> Tree:
    """Leaves of all kinds, none of which four ranks divide."""
    return {
        "vector": normal(6),
        "matrix": normal(5, 4).float(),
        "scalar": normal(),
        "moments": Moments(normal(7).bfloat16(), [normal(3, 5).t(), normal(1, 6)]),
        "empty": torch.zeros(0, 3),
        "counts": torch.arange(5),
        "mask": torch.tensor([True, False, True]),
        "complex": torch.complex(normal(3), normal(3)).conj(),
        "step": 10**30,
        "rate": 0.1,
        "odd": [float("inf"), -0.0, True, "text\n'\u00e9"],
    }


def zeros(tree: Tree) -> Tree:
    """A tree of the same kinds that holds nothing of it."""
    return optree.tree_map(
        lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else type(x)(),
        tree,
        namespace="yafsdp_fn",
    )


def bits(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        whole = yf.full(leaf).resolve_conj().reshape(-1).view(torch.uint8)
        return leaf.dtype, leaf.shape, leaf.stride(), whole.tolist()
    return type(leaf), repr(leaf)


def assert_bits(found: Tree, wanted: Tree) -> None:
    (mine, spec), (theirs, same) = (
        optree.tree_flatten(tree, namespace="yafsdp_fn") for tree in (found, wanted)
    )
    assert spec == same
    for one, other in zip(mine, theirs, strict=True):
        assert bits(one) == bits(other)


# --- saved at one mesh, loaded at another ---------------------------------------------


@pytest.mark.parametrize("saved", WORLDS, ids=str)
@pytest.mark.parametrize("loaded", WORLDS, ids=str)
def test_every_mesh_loads_what_every_mesh_has_saved(
    saved: Any, loaded: Any, tmp_path: Path
) -> None:
    yf.checkpoint.save(tmp_path, yf.distribute(state(), mesh_of(saved)))
    like = yf.distribute(zeros(state()), mesh_of(loaded))
    before = optree.tree_map(bits, like)
    found = yf.checkpoint.load(tmp_path, like)
    assert_bits(found, state())
    assert optree.tree_map(bits, like) == before
    for mine, wanted in zip(
        optree.tree_leaves(found), optree.tree_leaves(like), strict=True
    ):
        if isinstance(wanted, DTensor):
            assert mine.placements == wanted.placements
            assert mine.device_mesh == wanted.device_mesh


@settings(max_examples=settings().max_examples // 4)
@given(tree=trees(), before=meshes(), after=meshes(), block=st.integers(1, 64))
def test_any_tree_is_loaded_as_it_was_saved(
    tree: Tree,
    before: DeviceMesh,
    after: DeviceMesh,
    block: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    with mock.patch.object(_pieces, "_BLOCK_BYTES", block):
        yf.checkpoint.save(folder, yf.distribute(tree, before))
        found = yf.checkpoint.load(folder, yf.distribute(zeros(tree), after))
    assert_bits(found, tree)


@pytest.mark.parametrize(
    "placements", [*itertools.product([Shard(0), Shard(1)], repeat=2)]
)
def test_shards_of_two_axes_are_boxes(placements: Any, tmp_path: Path) -> None:
    matrix = normal(8, 12)
    yf.checkpoint.save(tmp_path, yf.distribute(matrix, mesh_of((2, 2)), placements))
    for other in (
        [Shard(1), Shard(0)],
        [Replicate(), Shard(1)],
        [Shard(0), Replicate()],
    ):
        like = yf.distribute(torch.zeros_like(matrix), mesh_of((2, 2)), other)
        assert_bits(yf.checkpoint.load(tmp_path, like), matrix)


def test_a_shape_without_memory_says_where_a_leaf_goes(tmp_path: Path) -> None:
    def make(key: torch.Tensor) -> Tree:
        return {"w": yf.random.normal(key, (6, 4)), "b": torch.zeros(6)}

    key, mesh = yf.random.key(0), mesh_of(4)
    yf.checkpoint.save(tmp_path, yf.init(make, mesh_of(3))(key))
    shapes = yf.eval_shape(make, key)
    found = yf.checkpoint.load(tmp_path, yf.distribute(shapes, mesh))
    assert_bits(found, make(key))
    assert all(leaf.device_mesh == mesh for leaf in optree.tree_leaves(found))
    assert_bits(yf.checkpoint.load(tmp_path, shapes), make(key))


def test_a_part_is_loaded_if_that_is_said(tmp_path: Path) -> None:
    yf.checkpoint.save(tmp_path, state())
    like = {"matrix": torch.zeros(5, 4), "step": 0}
    with pytest.raises(
        yf.CheckpointError, match=r"tree\['counts'\] is int64\[5\], which"
    ):
        yf.checkpoint.load(tmp_path, like)
    found = yf.checkpoint.load(tmp_path, like, partial=True)
    assert_bits(found, {k: state()[k] for k in like})


def test_a_rank_reads_what_it_will_hold_and_no_more(tmp_path: Path) -> None:
    """In blocks of a row each, the ranks of a mesh read each row once."""
    read = []
    commit = yf.checkpoint._load._Planner.commit_tensor

    def counting(planner: Any, item: Any, tensor: torch.Tensor) -> None:
        read.append(tensor.shape)
        commit(planner, item, tensor)

    with mock.patch.object(_pieces, "_BLOCK_BYTES", 32):
        yf.checkpoint.save(tmp_path, normal(12, 4))
        with mock.patch.object(yf.checkpoint._load._Planner, "commit_tensor", counting):
            like = yf.distribute(torch.zeros(12, 4).double(), mesh_of(4))
            yf.checkpoint.load(tmp_path, like)
    assert read == [(1, 4)] * 12


# --- training goes on -----------------------------------------------------------------


def test_a_copy_is_saved_while_training_goes_on(tmp_path: Path) -> None:
    step = yf.shard(lambda p, batch: p + batch.sum(), donate_argnums=0)
    params = yf.distribute(torch.zeros(5), mesh_of(4))
    for n in range(5):
        saving = yf.checkpoint.async_save(tmp_path, {"p": params, "n": n})
        params = step(params, torch.ones(1))
    saving.result()
    like = {"p": yf.distribute(torch.ones(5), mesh_of(3)), "n": 0}
    assert_bits(
        yf.checkpoint.load(tmp_path, like), {"p": torch.full((5,), 4.0), "n": 4}
    )


def test_what_went_wrong_in_the_background_is_said_once(tmp_path: Path) -> None:
    tree = {"w": torch.ones(3)}
    yf.checkpoint.save(tmp_path, tree)
    fails = mock.patch.object(
        _save._Planner, "resolve_data", side_effect=OSError("full")
    )
    for ask in (True, False):
        with fails:
            saving = yf.checkpoint.async_save(tmp_path, {"w": torch.zeros(3)})
            while not saving.done():
                time.sleep(0.01)
        with pytest.raises(yf.CheckpointError, match=r"rank 0 could not write .*full"):
            saving.result() if ask else yf.checkpoint.save(tmp_path, tree)
        found = yf.checkpoint.load(tmp_path, {"w": torch.zeros(3)})
        assert_bits(found, tree)


CONFIG = {"layers": 1, "width": 16, "context": 8, "batch": 6, "steps": 6, "sample": 1}


def test_training_that_was_stopped_goes_on_as_if_it_had_not_been(
    tmp_path: Path,
) -> None:
    run, module = str(tmp_path), llama()

    def losses(**options: Any) -> list[float]:
        found: list[float] = module.train(
            module.Config(emulate=True, **CONFIG, **options)
        )
        return found

    text = torch.randint(1, 256, (2000,), dtype=torch.uint8)
    with mock.patch.object(module, "read_corpus", return_value=(text, text)):
        whole = losses(ranks=2)
        begin = losses(ranks=2, save=run, save_every=2, stop=4)
        assert begin == whole[:4]
        assert losses(ranks=2, resume=run) == whole[4:]
        assert losses(ranks=3, resume=run) == pytest.approx(whole[4:], rel=1e-5)


# --- what else is in a folder ---------------------------------------------------------


def test_what_others_keep_in_a_folder_stays(tmp_path: Path) -> None:
    kept = ["2024", "9", "notes.txt", ".cache.partial", "model_old.safetensors"]
    for name in kept:
        (tmp_path / name).mkdir()
    for n in range(3):
        yf.checkpoint.save(tmp_path, {"n": n})
    yf.checkpoint.save_safetensors(tmp_path, {"w": torch.ones(1)})
    assert yf.checkpoint.load(tmp_path, {"n": 0}) == {"n": 2}
    assert {path.name for path in tmp_path.iterdir()} >= {*kept}
    assert len(list(tmp_path.iterdir())) == len(kept) + 2


def test_a_newer_checkpoint_is_read_if_one_takes_the_place(tmp_path: Path) -> None:
    """Another process saves between the look for the last one and its reading."""
    yf.checkpoint.save(tmp_path, {"w": torch.ones(3), "n": 1})
    read, turns = yf.checkpoint._load.read_tree, []

    def late(checkpoint: Path) -> Any:
        if not turns:
            turns.append(checkpoint)
            yf.checkpoint.save(tmp_path, {"w": torch.zeros(3), "n": 2})
        return read(checkpoint)

    with mock.patch.object(yf.checkpoint._load, "read_tree", late):
        found = yf.checkpoint.load(tmp_path, {"w": torch.ones(3), "n": 0})
    assert_bits(found, {"w": torch.zeros(3), "n": 2})


def save_and_leave(folder: str) -> None:
    mesh = yf.make_mesh(fsdp=2, device_type="cpu")
    whole = torch.arange(2e6)
    yf.checkpoint.async_save(folder, {"w": yf.distribute(whole, mesh)})


def test_processes_end_when_their_checkpoint_is_written(tmp_path: Path) -> None:
    yf.launch(save_and_leave, str(tmp_path), nprocs=2)
    found = yf.checkpoint.load(tmp_path, {"w": torch.zeros(2_000_000)})
    assert torch.equal(found["w"], torch.arange(2e6))
    with pytest.raises(yf.LaunchError, match="CheckpointError"):
        yf.launch(save_and_leave, "/dev/null/x", nprocs=2)
    program = (
        "import torch, yafsdp_fn as yf; "
        "yf.checkpoint.async_save('/dev/null/x', {'w': torch.ones(3)})"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert "async_save: NotADirectoryError" in run.stderr


# --- what is refused ------------------------------------------------------------------

WRONG: list[tuple[Tree, str]] = [
    ({"w": torch.zeros(5, 4)}, r"tree\['w'\] is float32\[6, 4\], but float32\[5, 4\]"),
    ({"w": torch.zeros(6, 4).double()}, r"is float32\[6, 4\], but float64\[6, 4\]"),
    ({"w": 1}, r"tree\['w'\] is float32\[6, 4\], but the int 1 is needed"),
    ({"v": torch.zeros(2)}, r"tree\['v'\] is not there, but float32\[2\] is needed"),
    ({"n": 1.0}, r"tree\['n'\] is the int 3, but the float 1.0 is needed"),
    ({"n": True}, r"tree\['n'\] is the int 3, but the bool True is needed"),
    ({"n": torch.tensor(3)}, r"is the int 3, but int64\[\] is needed"),
]


@pytest.mark.parametrize(("like", "message"), WRONG, ids=[m for _, m in WRONG])
def test_leaves_that_differ_are_named(like: Tree, message: str, tmp_path: Path) -> None:
    tree = {"w": torch.zeros(6, 4), "n": 3}
    yf.checkpoint.save(tmp_path, tree)
    with pytest.raises(yf.CheckpointError, match=message):
        yf.checkpoint.load(tmp_path, zeros(tree) | like)


class Named(int):
    def __repr__(self) -> str:
        return "the same"


def test_what_no_checkpoint_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(yf.ArgumentError, match=r"tree\['f'\] is a function"):
        yf.checkpoint.save(tmp_path, {"f": lambda: 0})
    with pytest.raises(yf.ArgumentError, match="two leaves have the path"):
        yf.checkpoint.save(tmp_path, {Named(1): 1, Named(2): 2})
    step = yf.shard(lambda p, batch: p + batch.sum(), donate_argnums=0)
    params = yf.distribute(torch.zeros(5), mesh_of(4))
    step(params, torch.ones(1))
    with pytest.raises(yf.DonatedError, match="tree was donated as p to"):
        yf.checkpoint.save(tmp_path, params)
    with pytest.raises(yf.CheckpointError, match="holds no complete checkpoint"):
        yf.checkpoint.load(tmp_path, params)


def save_another_tree(folder: str) -> list[str]:
    mesh = yf.make_mesh(fsdp=2, device_type="cpu")
    rank = mesh.get_rank()
    tree = {"w": yf.distribute(torch.ones(4), mesh)}
    bad: list[Tree] = [{"w": tree["w"], "n": rank}, {"w": tree["w"], str(rank): 1}]
    bad.append({"f": print} if rank else tree)
    said = []
    for wrong in bad:
        for save in (yf.checkpoint.save, yf.checkpoint.async_save):
            with pytest.raises(yf.YafsdpError) as caught:
                save(folder, wrong)
            said.append(f"{type(caught.value).__name__}: {caught.value}")
    yf.checkpoint.save(folder, tree)
    return said


def test_ranks_with_different_trees_are_told_so(tmp_path: Path) -> None:
    first, second = yf.launch(save_another_tree, str(tmp_path), nprocs=2)
    assert first == second
    assert all(
        "ArgumentError: the ranks pass different arguments" in x for x in first[:4]
    )
    assert "tree['n'] is" in first[0]
    assert all("rank 1: tree['f'] is a builtin" in text for text in first[4:])
    assert_bits(
        yf.checkpoint.load(tmp_path, {"w": torch.zeros(4)}), {"w": torch.ones(4)}
    )


# --- damage ---------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damages(content: bytes) -> Iterator[bytes]:
    """A file cut off at several places, and with a bit changed at many."""
    places = random.Random(0)
    yield b""
    for at in [1, len(content) // 2, len(content) - 1]:
        yield content[:at]
    for _ in range(30):
        changed = bytearray(content)
        changed[places.randrange(len(content))] ^= 1 << places.randrange(8)
        yield bytes(changed)


def test_damage_is_found_or_does_no_harm(tmp_path: Path) -> None:
    tree = {"w": normal(40, 16), "b": normal(5), "n": 3}
    yf.checkpoint.save(tmp_path, yf.distribute(tree, mesh_of(4)))
    like = yf.distribute(zeros(tree), mesh_of(3))
    found = harmless = 0
    for file in files(tmp_path):
        content = file.read_bytes()
        for damaged in damages(content):
            file.write_bytes(damaged)
            try:
                assert_bits(yf.checkpoint.load(tmp_path, like), tree)
                harmless += 1  # padding, or a name that nobody reads
            except yf.CheckpointError as error:
                assert str(file) in str(error), error  # noqa: PT017
                found += 1
        file.unlink()
        with pytest.raises(yf.CheckpointError, match="missing or damaged"):
            yf.checkpoint.load(tmp_path, like)
        file.write_bytes(content)
    assert found > 2 * harmless
    assert_bits(yf.checkpoint.load(tmp_path, like), tree)
    assert_bits(like, zeros(tree))


# --- killed at any moment -------------------------------------------------------------


def test_killed_at_any_moment_the_last_checkpoint_is_there(tmp_path: Path) -> None:
    """One process is killed fifty times, each time in the middle of its saves."""
    like = {"w": torch.zeros(400, 1000), "n": 0}
    yf.checkpoint.save(tmp_path, like)
    moments = random.Random(0)
    left = 0
    command = [sys.executable, "-c", FORKING, str(tmp_path)]
    with subprocess.Popen(command, **PIPES) as writer:
        assert writer.stdin
        assert writer.stdout
        assert writer.stdout.readline() == "ready\n"
        for _ in range(50):
            writer.stdin.write(f"{moments.uniform(0, 0.05)}\n")
            writer.stdin.flush()
            saved = int(writer.stdout.readline())
            found = yf.checkpoint.load(tmp_path, like)
            assert found["n"] >= saved
            assert torch.equal(found["w"], torch.full_like(found["w"], found["n"]))
            left += bool(list(tmp_path.glob(".*.partial")))
        writer.kill()
    assert left > 5  # it was killed in the middle of a checkpoint


PIPES: dict[str, Any] = {
    "stdin": subprocess.PIPE,
    "stdout": subprocess.PIPE,
    "text": True,
}
# A process that is forked for each attempt starts at once.
FORKING = """
import os, signal, sys, time, torch, yafsdp_fn as yf
torch.set_num_threads(1)
print("ready", flush=True)
first = 1
for line in sys.stdin:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for n in range(first, 10**9):
            tree = {"w": torch.full((400, 1000), float(n)), "n": n}
            yf.checkpoint.save(sys.argv[1], tree)
            os.write(write, b"%d\\n" % n)
    os.close(write)
    with os.fdopen(read) as saved:
        saved.readline()  # one is complete
        time.sleep(float(line))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        last = max([first, *map(int, saved.read().split())])
    print(last, flush=True)
    first = last + 1
"""
