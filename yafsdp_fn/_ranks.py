"""Which rank did not take part in a collective.

gloo says that a connection was closed or that time is over, and not whose. A rank that
has waited in vain says so in the store of the process group, and looks who else does:
who does not is the one that all wait for.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ._errors import YafsdpError
from ._torch import default_store, group_timeout

_GRACE = 3.0  # seconds in which all that wait have noticed
_KEY = "yafsdp_fn/waited"


class RankError(YafsdpError, RuntimeError):
    """A rank has ended, hangs, or is elsewhere: says which, and who waited for it."""


@contextlib.contextmanager
def waiting(group: dist.ProcessGroup | None) -> Iterator[None]:
    """What talks to the ranks of a group.

    Raises:
        RankError: It failed; names the ranks that did not take part.
    """
    try:
        yield
    except RuntimeError as error:  # of which the errors of c10d are
        if group is None or isinstance(error, YafsdpError):
            raise
        raise RankError(_described(group, error)) from error


def _described(group: dist.ProcessGroup, error: RuntimeError) -> str:
    members, seconds = dist.get_process_group_ranks(group), group_timeout(group)
    missing = _missing(members)
    if not missing:
        return f"the ranks {members} could not communicate: {error}"
    return (
        f"rank {dist.get_rank()} waited in a collective for {ranks_text(missing)}, "
        "which has ended, hangs, is stopped, or runs another program. The time-out is "
        f"{seconds:.0f} s: make_mesh(timeout=...). {error}"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 1, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _missing(members: Sequence[int]) -> list[int]:
    """The members that do not say within a while that they have waited too."""
    try:
        store = default_store()
        store.set(f"{_KEY}/{dist.get_rank()}", "")
        return absent(store, _KEY, members, _GRACE)
    except RuntimeError:  # the store has gone with its rank
        return []


def absent(store: Any, key: str, ranks: Sequence[int], seconds: float) -> list[int]:
    """The ranks without an entry in a store, after at most so many seconds."""
    end = time.monotonic() + seconds
    while True:
        missing = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
        if not missing or time.monotonic() > end:
            return missing
        time.sleep(0.1)
