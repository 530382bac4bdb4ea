"""Philox 4x32-10: four random words from a counter and a key, by arithmetic alone.

From Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011). A word is a number below 2**32; torch has no arithmetic on unsigned 32-bit
integers, so a word lies in the low half of an int64. The high half may hold anything
until a word is multiplied or handed out: masking late saves a third of the operators.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Word: TypeAlias = Tensor | int

MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_BUMPS = 0x9E3779B9, 0xBB67AE85  # the golden ratio, and sqrt(3) - 1


def philox(counter: Sequence[Word], key: Tensor) -> tuple[Tensor, ...]:
    """Four random words of each counter.

    Args:
        counter: Four words, of shapes that broadcast; a Python number below 2**31, or
            an int64 tensor whose low half counts.
        key: int64 `[2]`, two words.

    Returns:
        Four int64 tensors of the shape that the counter has, each in [0, 2**32).

    Example:
        >>> import torch
        >>> [hex(word) for word in philox((0, 0, 0, 0), torch.tensor([0, 0]))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    for k0, k1 in zip(*_round_keys(key), strict=True):
        # An int64 product wraps modulo 2**64: its bits are those of the unsigned one.
        p0, p1 = _MULTIPLIERS[0] * (c0 & MASK), _MULTIPLIERS[1] * (c2 & MASK)
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1, (p0 >> 32) ^ c3 ^ k1, p0
    return tuple(torch.as_tensor(c & MASK) for c in (c0, c1, c2, c3))


def _round_keys(key: Tensor) -> list[tuple[Tensor, ...]]:
    """Each word of the key before every round, bumped by a constant after each."""
    rounds = [
        torch.arange(0, _ROUNDS * bump, bump, device=key.device) for bump in _BUMPS
    ]
    return [(key[n] + bumps).unbind() for n, bumps in enumerate(rounds)]


# What a counter is used for stands in its last word: streams that never meet.
DRAW, SPLIT, FOLD = 0, 1, 2


def words(key: Tensor, shape: Sequence[int], lane: int = 0) -> Tensor:
    """One random word for every element of a shape; other lanes are independent.

    Every element is made by itself from its index, so that a rank can make its part of
    any dimension alone. Four neighbours of the last dimension share a counter, whose
    four words they take; in a vector, which may be split anywhere, none do.
    """
    if len(shape) < 2:
        return philox(_counter(key, shape, lane), key)[0]
    *rows, last = shape
    quads = philox(_counter(key, (*rows, -(-last // 4)), lane), key)
    neighbours = torch.stack(quads, dim=-1).flatten(-2)
    return neighbours if last % 4 == 0 else neighbours[..., :last].contiguous()


def _counter(key: Tensor, shape: Sequence[int], lane: int) -> tuple[Word, ...]:
    index = _row_major(shape, key.device)
    return *two_words(index, shape), lane, DRAW


def two_words(index: Tensor, shape: Sequence[int]) -> tuple[Word, Word]:
    """The low and the high word of an index into a shape; the high one is mostly 0."""
    return index, index >> 32 if _numel(shape) > MASK else 0


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _row_major(shape: Sequence[int], device: torch.device) -> Tensor:
    """The index of every element, from one `arange` a dimension.

    A single `arange` would have to be reshaped, and then only splits on dimension 0
    that fit it could be made in parts.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    for length in shape:
        index = index[..., None] * length + torch.arange(length, device=device)
    return index
