"""A folder that always holds its last complete checkpoint.

    runs/llama/
      .8.partial/   is being written, or was when its writer was killed
      7/            the last complete one
        tree.json   what the leaves are, and the values of those that are no tensors
        .metadata   torch.distributed.checkpoint: where the pieces of tensors lie
        __0_0.distcp, __1_0.distcp: the pieces that each rank has written

A checkpoint is complete when its folder has its name, which it gets in one step after
all files have reached the disk. An older one is removed only then.
"""

import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .._mesh import gathered
from .._pieces import bytes_of
from ._together import CheckpointError, Ranks

METADATA, TREE = ".metadata", "tree.json"


# --- folders --------------------------------------------------------------------------


def latest(folder: Path) -> Path | None:
    """The last complete checkpoint of a folder, if there is one."""
    numbers = [n for n in _numbers(folder) if _is_checkpoint(folder / str(n))]
    return folder / str(max(numbers)) if numbers else None


def _numbers(folder: Path) -> list[int]:
    """Names in a folder that are numbers; not all need to be checkpoints."""
    names = (each.name for each in folder.iterdir()) if folder.is_dir() else ()
    return [int(name) for name in names if re.fullmatch(r"[1-9]\d*", name)]


def _is_checkpoint(folder: Path) -> bool:
    return (folder / TREE).is_file() or (folder / METADATA).is_file()


Digests = dict[str, dict[str, int]]  # of saved blocks, by path and offsets


def replace_last(
    folder: Path, ranks: Ranks, fill: Callable[[Path], Digests], leaves: dict[str, Any]
) -> None:
    """Write a checkpoint that takes the place of the last one when it is whole.

    Args:
        folder: Where checkpoints lie.
        ranks: Those that write. A collective.
        fill: Writes the blocks of tensors, and returns the digests of those of this
            rank; a collective that fails on all ranks or none.
        leaves: What the leaves of the tree are.

    Raises:
        CheckpointError: It was not written; what was there is as it was.
    """
    partial = ranks.of_first(lambda: _begin(folder))
    try:
        blocks: Digests = {}
        for digests in gathered(fill(partial), [ranks.group]):
            for path, found in digests.items():
                blocks.setdefault(path, {}).update(found)
        tree = {"leaves": leaves, "blocks": blocks}
        ranks.of_first(lambda: _commit(partial, tree))
    except BaseException:
        if ranks.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _begin(folder: Path) -> Path:
    number = max(_numbers(folder), default=0) + 1
    for left in folder.glob(".*.partial"):  # by a process that was killed
        if re.fullmatch(r"\.\d+\.partial", left.name):
            shutil.rmtree(left)
    partial = folder / f".{number}.partial"
    partial.mkdir(parents=True)
    return partial


def _commit(partial: Path, tree: dict[str, Any]) -> None:
    _write_tree(partial, tree)
    for file in (*partial.iterdir(), partial):
        _to_disk(file)
    folder, number = partial.parent, int(partial.name.split(".")[1])
    partial.rename(folder / str(number))
    _to_disk(folder)
    for old in _numbers(folder):
        if old < number and _is_checkpoint(folder / str(old)):
            shutil.rmtree(folder / str(old), ignore_errors=True)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- what is in a checkpoint ----------------------------------------------------------


def _write_tree(checkpoint: Path, tree: dict[str, Any]) -> None:
    """Write what the leaves are, and digests of all that says where their bytes lie."""
    text = json.dumps({"metadata": _digest(checkpoint / METADATA), **tree})
    whole = f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n"
    (checkpoint / TREE).write_text(whole)


def read_tree(checkpoint: Path) -> tuple[dict[str, Any], Digests]:
    """What the leaves of a checkpoint are, by their paths, and digests of its blocks.

    Raises:
        CheckpointError: The file or the metadata is missing or damaged.
    """
    try:
        digest, text, _ = (checkpoint / TREE).read_bytes().split(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            raise ValueError(CHANGED)
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise damaged(checkpoint / TREE, error) from error
    if found["metadata"] != _digest(checkpoint / METADATA):
        raise damaged(checkpoint / METADATA, ValueError(CHANGED))
    return found["leaves"], found["blocks"]


CHANGED = "its bytes have changed since they were written"


def named(offsets: Sequence[int]) -> str:
    """A block's name among those of its leaf."""
    return ",".join(map(str, offsets))


def digest_of(tensor: torch.Tensor) -> int:
    """A number that the bytes of a tensor have in common with hardly any others."""
    return zlib.crc32(bytes_of(tensor))


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise damaged(file, error) from error


def damaged(file: Path, cause: Exception) -> CheckpointError:
    """The error of a file that cannot be read."""
    (first, *_) = str(cause).splitlines() or [type(cause).__name__]
    return CheckpointError(
        f"{file} is missing or damaged ({first}), so nothing was loaded. Load another "
        "checkpoint."
    )
