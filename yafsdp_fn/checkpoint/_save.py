"""save and async_save: each rank writes the pieces that it holds."""

import atexit
import functools
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from .._donate import refuse_donated
from .._errors import ArgumentError
from .._pieces import Piece, written_pieces
from .._torch import save_state_dict
from .._tree import flatten_with_paths
from ._folder import Digests, digest_of, named, replace_last
from ._together import CheckpointError, Failures, Ranks, all_ranks

# --- what is saved --------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """What this process writes of a tree.

    Attributes:
        leaves: What each leaf is: a tensor's shape and dtype, or a value; by its path.
        pieces: The pieces of tensors that this process writes, by path and offsets.
    """

    leaves: Mapping[str, Any]
    pieces: Mapping[tuple[str, tuple[int, ...]], tuple[Piece, torch.Size]]

    def copied(self) -> "Snapshot":
        """The same, in memory of its own on the CPU."""
        copies = {
            key: (replace(piece, tensor=piece.tensor.to("cpu", copy=True)), size)
            for key, (piece, size) in self.pieces.items()
        }
        return replace(self, pieces=copies)


def snapshot(tree: Any) -> Snapshot:
    paths, leaves, _ = named_leaves(tree)
    described: dict[str, Any] = {}
    pieces: dict[tuple[str, tuple[int, ...]], tuple[Piece, torch.Size]] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        refuse_donated(path, leaf)
        described[path] = describe(path, leaf)
        if isinstance(leaf, torch.Tensor):
            for piece in written_pieces(path, leaf):
                for block in piece.blocks():
                    pieces[path, block.offsets] = (block, leaf.shape)
    return Snapshot(described, pieces)


def named_leaves(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Paths of all leaves, the leaves, and the structure.

    Raises:
        ArgumentError: Two leaves have one path, so a checkpoint can't tell them apart.
    """
    paths, leaves, spec = flatten_with_paths(tree, "tree")
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise ArgumentError(
            f"two leaves have the path {twice[0]}. Give keys that are told apart by "
            "their repr, and nodes whose entries differ."
        )
    return paths, leaves, spec


def describe(path: str, leaf: Any) -> Any:
    """What a checkpoint says of a leaf; of a value that is no tensor, the value.

    Raises:
        ArgumentError: The leaf is neither a tensor nor a Python scalar.
    """
    if isinstance(leaf, torch.Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return {"shape": list(leaf.shape), "dtype": dtype}
    if isinstance(leaf, bool | int | float | str):
        return {"type": type(leaf).__name__, "value": leaf}
    raise ArgumentError(
        f"{path} is a {type(leaf).__qualname__}; a checkpoint holds tensors, bools, "
        "ints, floats and strings. Leave it out, or register its class as a node with "
        "optree."
    )


class _Planner(DefaultSavePlanner):
    """Every piece has one writer, so there is nothing to choose."""

    def __init__(self, taken: Snapshot) -> None:
        super().__init__(flatten_state_dict=False)
        self.taken = taken
        self.digests: Digests = {}  # of what was written

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(*key) for key in self.taken.pieces])
        return self.plan

    def _item(self, path: str, offsets: tuple[int, ...]) -> WriteItem:
        piece, size = self.taken.pieces[path, offsets]
        chunk = ChunkStorageMetadata(torch.Size(offsets), piece.tensor.shape)
        properties = TensorProperties(dtype=piece.tensor.dtype)
        return WriteItem(
            MetadataIndex(path, torch.Size(offsets)),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, size),
        )

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        path, offsets = write_item.index.fqn, write_item.index.offset
        assert offsets is not None
        piece, _ = self.taken.pieces[path, tuple(offsets)]
        tensor = piece.tensor.contiguous()
        self.digests.setdefault(path, {})[named(offsets)] = digest_of(tensor)
        return tensor


def _write(folder: Path, taken: Snapshot, ranks: Ranks) -> None:
    def fill(checkpoint: Path) -> Digests:
        planner, writer = _Planner(taken), FileSystemWriter(checkpoint)
        with ranks.planning(functools.partial(_cause, folder)):
            save_state_dict(writer, planner, ranks.group)
        return planner.digests

    replace_last(folder, ranks, fill, dict(taken.leaves))


def _cause(folder: Path, failures: Failures) -> str:
    rank, (error, *_) = min(failures.items())
    return (
        f"rank {rank} could not write a checkpoint to {folder}: "
        f"{type(error).__name__}: {error}. The last complete one is still there."
    )


# --- the functions --------------------------------------------------------------------


def save(path: str | PathLike[str], tree: Any) -> None:
    """Write a tree to a folder, in the place of what was saved there before.

    Every rank writes the shards that it holds; nothing is gathered. Killed at any
    moment, the folder holds the last complete checkpoint, and `load` finds it. All
    ranks call it, with a folder that all of them see; it waits for `async_save`.

    Args:
        path: The folder, which is made if it is not there.
        tree: A pytree of tensors, DTensors, bools, ints, floats and strings.

    Raises:
        ArgumentError: A leaf of another kind, a partial sum, or another tree on
            another rank.
        DonatedError: A leaf's memory was donated to an earlier call.
        CheckpointError: A rank could not write, on all ranks; names it and the cause.

    Example:
        >>> import tempfile, torch, yafsdp_fn as yf
        >>> folder = tempfile.mkdtemp()
        >>> yf.checkpoint.save(folder, {"w": torch.ones(2), "step": 7})
        >>> yf.checkpoint.load(folder, {"w": torch.zeros(2), "step": 0})
        {'w': tensor([1., 1.]), 'step': 7}
    """
    ranks = all_ranks()
    folder, taken = ranks.together(lambda: _taken(path, tree))
    ranks.agree(folder, taken.leaves)
    _write(folder, taken, ranks)


class AsyncSave:
    """A checkpoint that is being written; made by `async_save`."""

    def __init__(self, path: Path, future: "Future[None]") -> None:
        self.path, self._future, self._asked = path, future, False

    def done(self) -> bool:
        """Whether it has been written, or failed."""
        return self._future.done()

    def result(self) -> None:
        """Wait until it is written.

        Raises:
            CheckpointError: A rank could not write.
        """
        self._asked = True
        self._future.result()

    def __repr__(self) -> str:
        state = "done" if self.done() else "being written"
        return f"<checkpoint in {self.path}, {state}>"


_writer = ThreadPoolExecutor(1, "yafsdp_fn-checkpoint")  # Python waits for it at exit
_last: list[AsyncSave] = []
_lock = threading.Lock()


def async_save(path: str | PathLike[str], tree: Any) -> AsyncSave:
    """`save`, in a thread: returns as soon as the tree is copied.

    What a rank holds of the tree is copied to memory of the CPU, so the next step may
    donate it. One checkpoint is written at a time: the next save, or load, waits, and
    so does the end of the process; ask for the result before you destroy the process
    group yourself.

    Args:
        path: The folder.
        tree: As for `save`.

    Returns:
        A handle; `result()` waits, and raises what went wrong. If nobody asks it, the
        next save does.

    Raises:
        ArgumentError, DonatedError, CheckpointError: As `save`; the last one also for
            the checkpoint before.

    Example:
        >>> import tempfile, torch, yafsdp_fn as yf
        >>> w = torch.ones(2)
        >>> saving = yf.checkpoint.async_save(tempfile.mkdtemp(), {"w": w})
        >>> w = w.zero_()
        >>> saving.result()
        >>> yf.checkpoint.load(saving.path, {"w": w})
        {'w': tensor([1., 1.])}
    """
    ranks = all_ranks()
    folder, taken = ranks.together(lambda: _taken(path, tree, copy=True))
    ranks.agree(folder, taken.leaves)
    saving = AsyncSave(folder, _writer.submit(_write, folder, taken, ranks))
    with _lock:
        _last.append(saving)
    return saving


def _taken(
    path: str | PathLike[str], tree: Any, copy: bool = False
) -> tuple[Path, Snapshot]:
    wait_for_saves()
    taken = snapshot(tree)
    return Path(path).absolute(), taken.copied() if copy else taken


def wait_for_saves() -> None:
    """Wait for what is being written.

    Raises:
        CheckpointError: It could not be written.
    """
    with _lock:
        waiting, _last[:] = list(_last), []
    for saving in waiting:
        if saving._asked:  # it has said, or will say, what went wrong
            saving._future.exception()
        else:
            saving.result()


@atexit.register
def _tell() -> None:
    """Say what went wrong since anybody asked: nobody else will."""
    try:
        wait_for_saves()
    except CheckpointError as error:
        print(f"yafsdp_fn.checkpoint.async_save: {error}", file=sys.stderr)
