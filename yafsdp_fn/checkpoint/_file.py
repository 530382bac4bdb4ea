"""A safetensors file while it is written: every rank writes its part in its place."""

import itertools
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._pieces import Piece, bytes_of

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class File:
    """A file while it is written.

    Attributes:
        path: Its name when it is whole.
        leaves: The tensors in it, in the order in which they lie there.
    """

    path: Path
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves.values())

    @property
    def partial(self) -> Path:
        return self.path.with_name(f".{self.path.name}.partial")

    @property
    def begins(self) -> dict[str, int]:
        """The first byte of each tensor, after the header."""
        sizes = (leaf.nbytes for leaf in self.leaves.values())
        return dict(zip(self.leaves, itertools.accumulate(sizes, initial=0)))  # noqa: B905

    @property
    def layout(self) -> dict[str, Any]:
        """What each tensor is, and where it lies."""
        return {
            name: {
                "dtype": NAMES[leaf.dtype],
                "shape": list(leaf.shape),
                "data_offsets": [begin, begin + leaf.nbytes],
            }
            for (name, leaf), begin in zip(
                self.leaves.items(), self.begins.values(), strict=True
            )
        }

    @property
    def header(self) -> bytes:
        """Its length, and the layout, padded to 8 bytes."""
        text = json.dumps({"__metadata__": {"format": "pt"}, **self.layout}).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def begin(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        header = self.header
        with self.partial.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + self.nbytes)

    def fill(self, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """Write the pieces that lie in this process."""
        start, begins = len(self.header), self.begins
        with self.partial.open("r+b", buffering=0) as file:
            for name, leaf in self.leaves.items():
                blocks = (block for piece in pieces[name] for block in piece.blocks())
                for offset, run in _runs(blocks, leaf.shape):
                    file.seek(start + begins[name] + offset)
                    file.write(run)
            os.fsync(file.fileno())


def _runs(
    blocks: Iterator[Piece], shape: Sequence[int]
) -> Iterator[tuple[int, memoryview]]:
    """The bytes of blocks, in runs as they lie in the full tensor, with offsets."""
    for block in blocks:
        tensor = block.tensor
        whole = [n == size for n, size in zip(tensor.shape, shape, strict=True)]
        # From the last dimension that is cut on, rows lie together.
        cut = max((d for d, all_of_it in enumerate(whole) if not all_of_it), default=0)
        steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        data = bytes_of(tensor)
        outer = [range(n) for n in tensor.shape[:cut]]
        length = len(data) // max(1, math.prod(tensor.shape[:cut]))
        for number, at in enumerate(itertools.product(*outer)):
            index = (*at, *[0] * (len(shape) - cut))
            places = zip(index, block.offsets, steps, strict=True)
            first = sum((i + begin) * step for i, begin, step in places)
            run = data[number * length : (number + 1) * length]
            yield first * tensor.itemsize, run
