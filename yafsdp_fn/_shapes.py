"""How values lie in memory on the first rank: shapes, strides, and what is shared.

The parts of the first rank are never smaller than those of another, so what is planned
for them has room for all.
"""

from collections.abc import Sequence

import torch

from ._graph import filled
from ._layout import Meta
from ._placed import Slice
from ._program import Adjust, Compute, Program, bind
from ._torch import storage_id

# --- one value ------------------------------------------------------------------------


def dense_stride(shape: Sequence[int], like: Sequence[int]) -> list[int]:
    """Strides without gaps, dimensions in the order in which `like` has them."""
    order = sorted(range(len(shape)), key=lambda dim: (-like[dim], dim))
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return strides


def in_order(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A value with its dimensions in memory in the order that `stride` has them.

    Kernels are chosen while a step is traced, some of them for the strides that they
    see then; what a collective writes must not lie in another order.
    """
    order = sorted(range(tensor.dim()), key=lambda dim: -stride[dim])
    seen = [tensor.stride(d) for d in order if tensor.shape[d] > 1]
    if seen == sorted(seen, reverse=True):
        return tensor
    inverse = sorted(range(tensor.dim()), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(inverse)


def is_direct(meta: Meta, dim: int) -> bool:
    """Whether a collective along `dim` reads or writes a value where it lies.

    It does if the value is rows, in order.
    """
    order = [-s for s, n in zip(meta.stride, meta.shape, strict=True) if n > 1]
    return dim == 0 and order == sorted(order) and len(meta.shape) > 0


def packed_bytes(meta: Meta, cut: tuple[int, int], ranks: int) -> int:
    """Bytes of a whole value that is padded along `dim` so that parts are equal.

    A cut is `(dim, chunk)`, as in `Transfer`.
    """
    dim, chunk = cut
    return chunk * ranks * (meta.nbytes // max(1, meta.shape[dim]))


# --- all values -----------------------------------------------------------------------


class Shapes:
    """Shapes, strides and shared memory of the first rank's values, on no device."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.tensors: dict[int, torch.Tensor] = {}
        for number in program.values:
            self.tensors[number] = self._dense(number)

    def _dense(self, number: int) -> torch.Tensor:
        local = self.program.values[number]
        shape = local.shape(self.program.first)
        stride = dense_stride(shape, local.meta.stride)
        return torch.empty_strided(shape, stride, dtype=local.meta.dtype, device="meta")

    def owners(self) -> dict[int, int]:
        """For every value the one whose memory it shares."""
        owner = {number: number for number in self.program.values}
        for instruction in (*self.program.constants, *self.program.instructions):
            if isinstance(instruction, Compute) and is_view(instruction.op):
                self._view(instruction, owner)
            elif isinstance(instruction, Adjust):
                source, target = instruction.source.id, instruction.target.id
                owner[target] = owner[source]
                if isinstance(instruction.move, Slice):
                    self.tensors[target] = self._cut(instruction)
        return owner

    def alike(self, one: int, other: int) -> bool:
        """Whether two values lie in memory in the same way, from its begin."""
        a, b = self.tensors[one], self.tensors[other]
        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and a.stride() == b.stride()
            and b.storage_offset() == 0
        )

    def _view(self, instruction: Compute, owner: dict[int, int]) -> None:
        source = instruction.reads[0].id
        args, kwargs = bind((instruction.args, instruction.kwargs), self.program.first)
        args, kwargs = filled((args, kwargs), self.tensors)
        made = instruction.op(*args, **kwargs)
        rows = (made,) if isinstance(made, torch.Tensor) else made
        for ref, tensor in zip(instruction.outputs, rows, strict=True):
            if ref is not None and _shares(tensor, self.tensors[source]):
                self.tensors[ref.id] = tensor
                owner[ref.id] = owner[source]

    def _cut(self, instruction: Adjust) -> torch.Tensor:
        target = self.program.values[instruction.target.id]
        move = instruction.move
        assert isinstance(move, Slice)
        length = target.shape(self.program.first)[move.dim]
        return self.tensors[instruction.source.id].narrow(move.dim, 0, length)


def _shares(view: torch.Tensor, base: torch.Tensor) -> bool:
    return storage_id(view) == storage_id(base)


def is_view(op: object) -> bool:
    """Whether an operator's results may share memory with its operand."""
    return getattr(op, "is_view", False) or op in _VIEWS_BY_ANOTHER_NAME


_VIEWS_BY_ANOTHER_NAME = {
    torch.ops.aten.reshape.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
}
