"""safetensors: what others write is read in parts, what is written others read."""

import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import mesh_of
from test_cases import normal
from torch.distributed.tensor import Replicate, Shard

import yafsdp_fn as yf
from yafsdp_fn import _pieces

Tree = Any
SAVE, LOAD = yf.checkpoint.save_safetensors, yf.checkpoint.load_safetensors


def params() -> Tree:
    """All dtypes of which torch makes zeros, uneven, in two levels."""
    return {
        "layers": [
            {"w": normal(5, 4).float(), "b": normal(3).bfloat16()},
            {"w": normal(7, 3).t(), "b": torch.arange(5, dtype=torch.int8)},
        ],
        "mask": torch.tensor([[True, False, True]]),
        "scalar": normal().half(),
        "empty": torch.zeros(0, 4),
        "complex": torch.complex(normal(3).float(), normal(3).float()).conj(),
        "eight": normal(6).to(torch.float8_e4m3fn),
    }


def named(tree: Tree) -> dict[str, torch.Tensor]:
    return {
        f"layers.{n}.{k}": x
        for n, row in enumerate(tree["layers"])
        for k, x in row.items()
    } | {k: tree[k] for k in tree if k != "layers"}


def assert_equal(found: Tree, wanted: Tree) -> None:
    assert found.keys() == wanted.keys()
    for name, theirs in wanted.items():
        mine = found[name]
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        first, other = (
            x.resolve_conj().reshape(-1).view(torch.uint8) for x in (mine, theirs)
        )
        assert torch.equal(first, other), name


@pytest.mark.parametrize("world", [1, 3, 4, (2, 2)], ids=str)
@pytest.mark.parametrize("most", [5e9, 100.0], ids=["one file", "many files"])
def test_what_ranks_write_together_is_what_one_would(
    world: Any, most: float, tmp_path: Path
) -> None:
    placed = yf.distribute(params(), mesh_of(world))
    with mock.patch.object(_pieces, "_BLOCK_BYTES", 16):
        SAVE(tmp_path, placed, max_file_bytes=most)
        found = LOAD(tmp_path, yf.distribute(params(), mesh_of(2)))
    assert_equal(named(yf.full(found)), named(params()))
    files = sorted(tmp_path.glob("*.safetensors"))
    read = {k: x for file in files for k, x in load_file(file).items()}
    assert_equal(read, named(params()))
    index = tmp_path / "model.safetensors.index.json"
    assert (len(files) > 1) == index.exists() == (most < 1e9)
    if index.exists():
        places = json.loads(index.read_text())["weight_map"]
        assert places == {k: f.name for f in files for k in load_file(f)}
    SAVE(tmp_path, {"one": torch.ones(2)})  # in the place of all of them
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    "placements", [*itertools.product([Shard(0), Shard(1)], repeat=2)]
)
def test_boxes_of_any_shape_lie_where_they_belong(
    placements: Any, tmp_path: Path
) -> None:
    tree = {"w": normal(8, 12), "v": normal(4, 8, 5)}
    file = tmp_path / "weights.safetensors"
    SAVE(file, yf.distribute(tree, mesh_of((2, 2)), placements))
    found = load_file(file)
    assert all(torch.equal(found[k], tree[k]) for k in tree)
    like = yf.distribute(tree, mesh_of((2, 2)), [Shard(1), Replicate()])
    assert all(torch.equal(v, tree[k]) for k, v in yf.full(LOAD(file, like)).items())


def test_a_model_of_transformers_makes_the_way_there_and_back(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40)
    before = transformers.GPT2LMHeadModel(config).eval()
    before.save_pretrained(tmp_path, max_shard_size="20KB")
    weights, _, apply = yf.functional(transformers.GPT2LMHeadModel(config).eval())
    found = LOAD(tmp_path, yf.distribute(weights, mesh_of(3)))
    tokens = torch.arange(12).view(2, 6)
    wanted = before(tokens).logits
    assert torch.equal(apply(yf.full(found), {}, tokens)[0].logits, wanted)
    for old in tmp_path.glob("*.safetensors*"):
        old.unlink()
    SAVE(tmp_path, found)
    after = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert torch.equal(after(tokens).logits, wanted)


def test_what_was_there_stays_if_a_save_fails(tmp_path: Path) -> None:
    SAVE(tmp_path, {"w": torch.ones(2)})
    fails = mock.patch.object(yf.checkpoint._file, "_runs", side_effect=OSError("full"))
    with fails, pytest.raises(yf.CheckpointError, match="full"):
        SAVE(tmp_path, {"w": torch.zeros(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], torch.ones(2))


def test_a_mixture_of_two_models_is_not_read(tmp_path: Path) -> None:
    """A save of several files is interrupted after each of its steps in turn."""
    old, new = (
        {"a": torch.full((2,), n), "b": torch.full((2,), n)} for n in (1.0, 2.0)
    )
    rename, seen = Path.replace, set()
    for steps in itertools.count():
        SAVE(tmp_path, old, max_file_bytes=1)
        left = iter(range(steps))

        def stopping(path: Path, target: Path, left: Any = left) -> Path:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return rename(path, target)

        with mock.patch.object(Path, "replace", stopping):
            try:
                SAVE(tmp_path, new, max_file_bytes=1)
                break
            except KeyboardInterrupt:
                pass
        with pytest.raises(yf.CheckpointError, match="a save was interrupted"):
            LOAD(tmp_path, old)
        seen.add(steps)
    assert seen == {0, 1, 2}  # two files and the index
    assert torch.equal(LOAD(tmp_path, old)["a"], new["a"])


# --- what is refused ------------------------------------------------------------------


def test_names_are_changed_by_a_function_or_a_dict(tmp_path: Path) -> None:
    SAVE(tmp_path, {"a": torch.ones(2), "b": torch.zeros(3)}, str.upper)
    for rename in (str.upper, {"a": "A", "b": "B"}):
        found = LOAD(tmp_path, {"b": torch.ones(3)}, rename)
        assert torch.equal(found["b"], torch.zeros(3))
    with pytest.raises(
        yf.CheckpointError, match=r"tree\['a'\]: no file .* 'a'.* rename="
    ):
        LOAD(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(yf.ArgumentError, match=r"tree\['b'\] and tree\['a'\] are both"):
        SAVE(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)}, lambda name: "same")


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (torch.zeros(5), r"'w' in .* is F32\[6\], but F32\[5\] is needed"),
        (torch.zeros(6).bfloat16(), r"is F32\[6\], but BF16\[6\] is needed"),
        (3, r"tree\['w'\] is a int; safetensors hold tensors"),
    ],
)
def test_leaves_that_differ_are_named(like: Any, message: str, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(6)}, tmp_path / "model.safetensors")
    with pytest.raises(yf.YafsdpError, match=message):
        LOAD(tmp_path, {"w": like})


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(yf.CheckpointError, match="no safetensors file and no folder"):
        LOAD(tmp_path, {"w": torch.zeros(6)})
    SAVE(tmp_path, {"w": torch.zeros(6), "v": torch.zeros(6)}, max_file_bytes=1)
    first, *_ = sorted(tmp_path.glob("*.safetensors"))
    content = first.read_bytes()
    for damaged in (b"", content[:10], content[:-3]):
        first.write_bytes(damaged)
        with pytest.raises(yf.CheckpointError, match=f"{first.name} is missing or dam"):
            LOAD(tmp_path, {"v": torch.zeros(6)})
    first.unlink()
    with pytest.raises(yf.CheckpointError, match=f"{first.name} is missing or damaged"):
        LOAD(tmp_path, {"v": torch.zeros(6)})
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(yf.CheckpointError, match=r"index.json is damaged"):
        LOAD(tmp_path, {"v": torch.zeros(6)})
