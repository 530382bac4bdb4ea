"""Messages between ranks of one host: one copy, from memory into the memory of another.

All ranks run the same program, so what lies in the arena of one lies at the same place
in the arenas of the others. Their arenas are mapped here: a rank writes its message
where the receiver wants it as soon as the receiver says that the place is free, and
says then that it is there. The idea is that of symmetric memory, as in OpenSHMEM.

Ranks are on one host if they share kernel, processes and network: what a network
namespace keeps apart goes through its network.
"""

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ._arena import POOL, Segment
from ._mesh import gathered
from ._ranks import RankError
from ._torch import group_timeout

# --- which ranks are near -------------------------------------------------------------


def host() -> tuple[str, ...] | None:
    """Equal for processes that can map each other's memory; None if none can."""
    # Other processors may show writes to another core in another order.
    usable = hasattr(os, "memfd_create") and platform.machine() in ("x86_64", "AMD64")
    if not usable or os.environ.get("YAFSDP_FN_SHARED_MEMORY") == "0":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    spaces = (os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net"))
    return (boot, str(os.getuid()), *spaces)


def join(group: dist.ProcessGroup, slots: int) -> "Neighbours | None":
    """The ranks of a group as neighbours, if all are on this host. A collective.

    Args:
        group: The processes along a mesh axis.
        slots: How many kinds of messages there are.
    """
    if dist.get_backend(group) != "gloo" or not slots:
        return None
    ranks = dist.get_world_size(group)
    own = Segment(_page_bytes(slots, ranks))
    found = gathered((host(), os.getpid(), own.fd), [group])
    places = {place for place, _, _ in found}
    pages = None
    if len(places) == 1 and None not in places:
        pages = _mapped([(pid, fd) for _, pid, fd in found], own.nbytes)
    if not all(gathered(pages is not None, [group])):
        return None
    assert pages is not None
    return Neighbours(group, slots, own, pages, [pid for _, pid, _ in found])


def _mapped(places: Sequence[tuple[int, int]], nbytes: int) -> list[mmap.mmap] | None:
    try:
        return [_map(pid, fd, nbytes) for pid, fd in places]
    except OSError:  # a sandbox forbids it
        return None


def _map(pid: int, fd: int, nbytes: int) -> mmap.mmap:
    """Map memory of another process."""
    with Path(f"/proc/{pid}/fd/{fd}").open("r+b", buffering=0) as file:
        return mmap.mmap(file.fileno(), nbytes)


# --- messages -------------------------------------------------------------------------

_HEAD = 3  # generation, descriptor and bytes of a rank's arena


def _page_bytes(slots: int, ranks: int) -> int:
    """A rank's page: the head, then by slot whether it is ready and who has written."""
    return 8 * (_HEAD + slots + slots * ranks)


class Neighbours:
    """The ranks of a group that exchange messages through memory.

    Every rank has a page that the others read and write: it says where its arena is,
    which places are ready to be written, and whose messages have arrived.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots: int,
        segment: Segment,
        pages: Sequence[mmap.mmap],
        processes: Sequence[int],
    ) -> None:
        self.ranks, self.own = dist.get_world_size(group), dist.get_rank(group)
        self.world = dist.get_process_group_ranks(group)
        self.others = [(self.own + n) % self.ranks for n in range(1, self.ranks)]
        self.slots, self.segment, self.processes = slots, segment, processes
        self.pages = [memoryview(page).cast("q") for page in pages]
        self.timeout = group_timeout(group)
        self.run = 0  # what pages say of earlier runs of the program is over
        self.arenas: dict[int, tuple[int, Any]] = {}  # of others
        self.unsent: list[tuple[int, int, int, torch.Tensor]] = []

    def begin(self, arena: torch.Tensor) -> None:
        """Begin a run of the program in an arena."""
        self.run += 1
        self.unsent.clear()
        self.base = arena.data_ptr()
        segment, page = POOL.segment(arena), self.pages[self.own]
        page[1], page[2] = segment.fd, segment.nbytes
        page[0] = segment.generation

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the arena, so that others can write it."""
        nbytes = self.pages[self.own][2]
        return 0 <= tensor.data_ptr() - self.base < nbytes

    def exchange(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], slot: int
    ) -> Callable[[], None]:
        """Send to and receive from every other rank; wait with what is returned.

        Args:
            sent: Bytes for every rank.
            received: Where those of every rank go, in the arena.
            slot: Tells messages of different transfers apart.
        """
        # In the receivers' arenas it is where they receive from this rank.
        offset = received[self.own].data_ptr() - self.base
        self.pages[self.own][_HEAD + slot] = self.run
        self.unsent += [(rank, slot, offset, sent[rank]) for rank in self.others]
        self.progress()
        return lambda: self._wait(slot)

    def progress(self) -> None:
        """Send what can be sent."""
        unsent, self.unsent = self.unsent, []
        for message in unsent:
            rank, slot, offset, tensor = message
            if self.pages[rank][_HEAD + slot] != self.run:
                self.unsent.append(message)
                continue
            place = self._arena(rank) + offset
            ctypes.memmove(place, tensor.data_ptr(), tensor.numel())
            self.pages[rank][self._arrival(slot, self.own)] = self.run

    def _arrival(self, slot: int, sender: int) -> int:
        return _HEAD + self.slots + slot * self.ranks + sender

    def _arena(self, rank: int) -> int:
        """The address of another rank's arena, mapped anew if it has been replaced."""
        generation, fd, nbytes = self.pages[rank][:_HEAD]
        known, mapped = self.arenas.get(rank, (-1, None))
        if mapped is None or known != generation:
            memory = _map(self.processes[rank], fd, nbytes)
            mapped = (ctypes.c_char * nbytes).from_buffer(memory)
            self.arenas[rank] = (generation, mapped)
        return ctypes.addressof(mapped)

    def _wait(self, slot: int) -> None:
        """Wait until all messages of a slot have been sent and have arrived."""
        begun, checked, turns = time.monotonic(), 0.0, 0
        while True:
            self.progress()
            missing = self._missing(slot)
            if not missing:
                return
            turns += 1
            time.sleep(0 if turns < _EAGER else _PAUSE)
            waited = time.monotonic() - begun
            if waited - checked > _CHECK:
                checked = waited
                self._check(missing, waited)

    def _missing(self, slot: int) -> set[int]:
        page = self.pages[self.own]
        missing = {r for r in self.others if page[self._arrival(slot, r)] != self.run}
        return missing | {rank for rank, s, _, _ in self.unsent if s == slot}

    def _check(self, missing: set[int], waited: float) -> None:
        """Raise if a rank has ended, or has not come for too long."""
        for rank in missing:
            if _state(self.processes[rank]) in "ZX":
                raise RankError(
                    f"{self._name(rank)} has ended before it took part in a collective "
                    f"of rank {self.world[self.own]}."
                )
        if waited > self.timeout:
            stopped = [r for r in missing if _state(self.processes[r]) in "tT"]
            names = ", ".join(self._name(r) for r in sorted(stopped or missing))
            what = "is stopped" if stopped else "hangs, or runs another program"
            raise RankError(
                f"rank {self.world[self.own]} waited {waited:.0f} s in a collective "
                f"for {names}, which {what}. The time-out is that of the process "
                "group: make_mesh(timeout=...)."
            )

    def _name(self, rank: int) -> str:
        return f"rank {self.world[rank]} (process {self.processes[rank]})"


_EAGER = 100  # turns in which a waiting rank only lets others run
_PAUSE = 5e-5  # seconds that it sleeps in later ones
_CHECK = 0.5  # seconds between looks at the other processes


def _state(process: int) -> str:
    """The state of a process as the kernel calls it; "X" if it is gone."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "X"
    return status.rpartition(")")[2].split()[0]
