"""load: each rank reads the pieces that it will hold."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)

from .._target import Target
from .._torch import load_state_dict
from .._tree import unflatten
from ._folder import CHANGED, Digests, damaged, digest_of, latest, named, read_tree
from ._save import describe, named_leaves, wait_for_saves
from ._together import CheckpointError, Failures, Ranks, all_ranks


class _Planner(LoadPlanner):
    """Reads every saved block that overlaps a target, checks it, and copies from it."""

    def __init__(self, targets: Mapping[str, Target], digests: Digests) -> None:
        self.targets, self.digests = targets, digests

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, *_: Any, **__: Any
    ) -> None:
        assert metadata is not None
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        rows = self.targets.items()
        return LoadPlan([item for path, t in rows for item in self._reads(path, t)])

    def _reads(self, path: str, target: Target) -> Iterator[ReadItem]:
        found = self.metadata.state_dict_metadata.get(path)
        chunks = found.chunks if isinstance(found, TensorStorageMetadata) else []
        for chunk in chunks:
            if any(True for _ in target.overlaps(chunk.offsets, chunk.sizes)):
                index = MetadataIndex(path, chunk.offsets)
                begin = torch.Size([0] * len(chunk.sizes))
                kind = LoadItemType.TENSOR
                yield ReadItem(kind, index, begin, index, begin, chunk.sizes)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        dtype = self.targets[read_item.dest_index.fqn].like.dtype
        return torch.empty(read_item.lengths, dtype=dtype, device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        path, offsets = read_item.dest_index.fqn, read_item.dest_index.offset
        assert offsets is not None
        if self.digests.get(path, {}).get(named(offsets)) != digest_of(tensor):
            raise ValueError(CHANGED)
        target = self.targets[path]
        for place, part in target.overlaps(offsets, tensor.shape):
            place.copy_(tensor[part])

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise NotImplementedError  # what is no tensor stands in another file


class _Reader(FileSystemReader):
    """Reads block by block, to say whose bytes are damaged."""

    def read_data(
        self, plan: LoadPlan, planner: LoadPlanner
    ) -> torch.futures.Future[None]:
        for item in plan.items:
            try:
                super().read_data(dataclasses.replace(plan, items=[item]), planner)
            except Exception as error:
                found = self.storage_data[item.storage_index]
                file, leaf = Path(self.path) / found.relative_path, item.dest_index.fqn
                raise CheckpointError(f"{leaf}: {damaged(file, error)}") from error
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


# --- what is there, and what is needed ------------------------------------------------


def _compare(
    checkpoint: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any], partial: bool
) -> None:
    """Raise if a leaf is not what is needed."""
    wrong = [
        f"{path} is {_shown(saved[path])}, but {_shown(need)} is needed"
        if path in saved
        else f"{path} is not there, but {_shown(need)} is needed"
        for path, need in wanted.items()
        if _kind(saved.get(path)) != _kind(need)
    ]
    if not partial:
        left = (path for path in saved if path not in wanted)
        wrong += [f"{p} is {_shown(saved[p])}, which like= does not have" for p in left]
    if wrong:
        more = f"\n... and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(
            f"the checkpoint {checkpoint} holds another tree than like=:\n"
            + "\n".join(wrong[:_SHOWN])
            + f"{more}\nPass a like= of the tree that was saved; partial=True loads a "
            "part of it."
        )


_SHOWN = 10  # of what differs


def _kind(described: Any) -> Any:
    """What a leaf of `like` must have in common with what was saved."""
    if described is None or "value" not in described:
        return described
    return described["type"]


def _shown(described: Mapping[str, Any]) -> str:
    if "value" in described:
        return f"the {described['type']} {described['value']!r}"
    return f"{described['dtype']}[{', '.join(map(str, described['shape']))}]"


# --- the function ---------------------------------------------------------------------


def load(path: str | PathLike[str], like: Any, *, partial: bool = False) -> Any:
    """Read the last complete checkpoint of a folder.

    Every rank reads the rows that it will hold and little more (files are read in
    blocks of at most 16 MiB). All ranks call it, and it waits for `async_save`.

    Args:
        path: The folder that `save` was given.
        like: A tree of the structure, shapes and dtypes that were saved. It says where
            each leaf goes: a DTensor's mesh and placements may be others than those
            that were saved, a plain tensor is the full value on every rank. Its values
            are not read, and it is not changed; tensors on the meta device will do.
        partial: Whether leaves of the checkpoint that `like` lacks are left out.

    Returns:
        A tree like `like`, in new memory, with the values that were saved, bit for bit.

    Raises:
        CheckpointError: There is no complete checkpoint; a leaf is missing, has another
            shape or dtype; a file is missing or damaged. On all ranks.

    Example:
        >>> import tempfile, torch, yafsdp_fn as yf
        >>> folder = tempfile.mkdtemp()
        >>> yf.checkpoint.save(folder, {"w": torch.ones(2), "b": torch.zeros(1)})
        >>> yf.checkpoint.load(folder, {"w": torch.empty(2)}, partial=True)
        {'w': tensor([1., 1.])}
    """
    ranks = all_ranks()
    folder, *asked = ranks.together(lambda: _asked(path, like))
    ranks.agree(folder, {})
    while True:
        checkpoint = ranks.of_first(lambda: _last_in(folder))
        try:
            return _read(checkpoint, asked, partial, ranks)
        except CheckpointError:
            # Another process may have put a newer one in its place meanwhile.
            if ranks.of_first(lambda: latest(folder)) == checkpoint:
                raise


def _asked(path: str | PathLike[str], like: Any) -> tuple[Path, Any, Any, Any]:
    wait_for_saves()
    return (Path(path), *named_leaves(like))


def _read(checkpoint: Path, asked: Sequence[Any], partial: bool, ranks: Ranks) -> Any:
    paths, leaves, spec = asked

    def prepare() -> tuple[dict[str, Any], Digests, dict[str, Target]]:
        saved, blocks = read_tree(checkpoint)
        rows = list(zip(paths, leaves, strict=True))
        _compare(checkpoint, saved, {p: describe(p, leaf) for p, leaf in rows}, partial)
        tensors = [(p, leaf) for p, leaf in rows if isinstance(leaf, torch.Tensor)]
        return saved, blocks, {p: Target(p, leaf) for p, leaf in tensors}

    saved, blocks, targets = ranks.together(prepare)
    planner, reader = _Planner(targets, blocks), _Reader(checkpoint)
    with ranks.planning(functools.partial(_cause, checkpoint)):
        load_state_dict(reader, planner, ranks.group)
    return unflatten(
        spec, [targets[p].leaf() if p in targets else saved[p]["value"] for p in paths]
    )


def _last_in(folder: Path) -> Path:
    found = latest(folder)
    if found is None:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint. Give the folder that was given to "
            "yf.checkpoint.save."
        )
    return found


def _cause(checkpoint: Path, failures: Failures) -> str:
    rank, (error, *_) = min(failures.items())
    if isinstance(error, CheckpointError):
        return str(error) if len(failures) == 1 else f"rank {rank}: {error}"
    return f"rank {rank} could not read {checkpoint}: {type(error).__name__}: {error}"
