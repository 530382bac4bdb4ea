"""The memory that programs compute in: one block for every rank that lives here.

Programs run one at a time, so all of a process share a block as large as the largest
of them needs. It grows when a larger program is run, and is never copied.
"""

import contextlib
import gc
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

import torch

from ._errors import ArgumentError

_generations = itertools.count(1)


class Segment:
    """Bytes that other processes of the host can map.

    Attributes:
        fd: The descriptor that they open.
        nbytes: Its length.
        generation: Tells it from segments before it.
        tensor: The bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.generation = nbytes, next(_generations)
        self.fd = os.memfd_create("yafsdp_fn")
        os.ftruncate(self.fd, nbytes)
        self.tensor = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)
        weakref.finalize(self, os.close, self.fd)


class User(Protocol):
    """Whoever holds tensors that lie in a block."""

    def forget(self) -> None:
        """Drop them: the block has been replaced."""


class Pool:
    """Blocks of bytes by device and rank."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held while a program runs
        self.busy = False
        self.blocks: dict[tuple[torch.device, int], torch.Tensor] = {}
        self.segments: dict[int, Segment] = {}  # by the address of their block
        self.users: weakref.WeakSet[User] = weakref.WeakSet()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While a program runs.

        Raises:
            ArgumentError: It is run by an operator of one that runs already.
        """
        with self.lock:
            if self.busy:
                raise ArgumentError(
                    "a sharded function was called by an operator of another one, "
                    "while that ran. Call it in the step itself, where it is inlined, "
                    "or call the unsharded function in the operator."
                )
            self.busy = True
            try:
                yield
            finally:
                self.busy = False

    def block(
        self,
        user: User,
        device: torch.device,
        rank: int,
        nbytes: int,
        shared: bool = False,
    ) -> torch.Tensor:
        """A block of at least so many bytes, the same one until it must be replaced.

        Args:
            user: Is told when the block is replaced.
            device: Where the block lies.
            rank: Which of the ranks that live in this process it belongs to.
            nbytes: Bytes that are needed.
            shared: Whether other processes must be able to map it.
        """
        self.users.add(user)
        found = self.blocks.get((device, rank))
        small = found is None or found.numel() < nbytes
        if small or (shared and self._address(found) not in self.segments):
            nbytes = max(nbytes, 1, 0 if found is None else found.numel())
            self._drop((device, rank))
            del found
            self.blocks[device, rank] = self._made(device, nbytes, shared)
        return self.blocks[device, rank]

    def segment(self, block: torch.Tensor) -> Segment:
        """The segment that a shared block lies in."""
        return self.segments[block.data_ptr()]

    def _drop(self, key: tuple[torch.device, int]) -> None:
        for user in list(self.users):
            user.forget()
        block = self.blocks.pop(key, None)
        self.segments.pop(self._address(block), None)
        if block is not None:
            gc.collect()  # closures refer to each other, and to views of the block

    def _made(self, device: torch.device, nbytes: int, shared: bool) -> torch.Tensor:
        if not shared:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        segment = Segment(nbytes)
        self.segments[segment.tensor.data_ptr()] = segment
        return segment.tensor

    @staticmethod
    def _address(block: torch.Tensor | None) -> int:
        return 0 if block is None else block.data_ptr()


POOL = Pool()
