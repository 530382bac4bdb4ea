"""Ranks that save or load together: one fails, all are told."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from .._errors import ArgumentError, YafsdpError
from .._mesh import gathered
from .._ranks import waiting
from .._torch import group_timeout
from .._world import hash_of

Made = TypeVar("Made")
Failures = Mapping[int, Sequence[Any]]  # of ranks: the error, and where it was raised


class CheckpointError(YafsdpError, RuntimeError):
    """A checkpoint that cannot be written or read: which file and which leaf, why."""


class Ranks:
    """The processes that save or load together; one alone if no group runs.

    Attributes:
        group: A process group of their own, so that training may use another one.
        first: Whether this process is the first of them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.first = group is None or dist.get_rank(group) == 0

    def together(self, work: Callable[[], Made]) -> Made:
        """Do the work of each; if one fails, raise on all. A collective.

        Raises:
            CheckpointError: Says which rank failed, and why. If all fail alike, the
                error of each is raised itself.
        """
        made, error = None, None
        try:
            made = work()
        except Exception as caught:
            error = caught
        texts = gathered(None if error is None else _text(error), [self.group])
        failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
        if failed:
            rank, text = failed[0]
            alike = len(texts) == len(failed) and len(set(texts)) == 1
            if alike and isinstance(error, YafsdpError):
                raise error
            raise CheckpointError(text if alike else f"rank {rank}: {text}") from error
        return made  # type: ignore[return-value]

    @contextlib.contextmanager
    def planning(self, describe: Callable[[Failures], str]) -> Iterator[None]:
        """While torch.distributed.checkpoint plans and does the work. A collective.

        Raises:
            CheckpointError: A rank failed; raised on all, with what `describe` says.
        """
        try:
            with waiting(self.group):
                yield
        except CheckpointException as error:  # on all ranks, and no Exception
            raise CheckpointError(describe(error.failures)) from error

    def agree(self, path: Path, leaves: Mapping[str, Any]) -> None:
        """Make sure that all have the same path and tree. A collective.

        Raises:
            ArgumentError: On all ranks; names what differs.
        """
        said = {"path": str(path), **leaves}
        digests = gathered(hash_of(json.dumps(said)), [self.group])
        if len(set(digests)) == 1:
            return
        first, *others = gathered(said, [self.group])
        for rank, other in enumerate(others, 1):
            for name in [*first, *other]:
                mine, theirs = (json.dumps(x.get(name)) for x in (first, other))
                if mine != theirs:
                    raise ArgumentError(
                        f"the ranks pass different arguments: {name} is {mine} on rank "
                        f"0 and {theirs} on rank {rank}. Pass the same on all ranks."
                    )

    def of_first(self, work: Callable[[], Made]) -> Made:
        """What the first rank makes, on all of them. A collective."""
        made = self.together(lambda: work() if self.first else None)
        return gathered(made, [self.group])[0]


def _text(error: Exception) -> str:
    if isinstance(error, YafsdpError):
        return str(error)
    return f"{type(error).__name__}: {error}"


_GROUPS: dict[Any, Any] = {}  # of every default group, one for checkpoints


def all_ranks() -> Ranks:
    """All processes of the default group. A collective, the first time."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks(None)
    world = dist.group.WORLD
    assert world is not None
    if world not in _GROUPS:
        _GROUPS.clear()  # of a group that has been destroyed
        timeout = timedelta(seconds=group_timeout(world))
        _GROUPS[world] = dist.new_group(backend="gloo", timeout=timeout)
    return Ranks(_GROUPS[world])
