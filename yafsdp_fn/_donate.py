"""Donation: results are written into the memory of arguments that are given up."""

from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from ._errors import DonatedError
from ._torch import set_local_part
from ._tree import flatten

_MARK = "_yafsdp_donated"


def refuse_donated(path: str, leaf: Any) -> None:
    """Raise if a leaf was donated to an earlier call.

    Raises:
        DonatedError: Says which call took it.
    """
    taken = getattr(leaf, _MARK, None) if isinstance(leaf, torch.Tensor) else None
    if taken is not None:
        raise DonatedError(_message(path, taken))


def _message(path: str, taken: str) -> str:
    return (
        f"{path} was donated as {taken}, so its memory holds the results of that call. "
        "Use what the call returned, or leave the argument out of donate_argnums."
    )


def take(leaf: torch.Tensor, taken: str) -> None:
    """Mark a leaf as donated; any later use of it, in any operator, raises."""
    setattr(leaf, _MARK, taken)
    if isinstance(leaf, DTensor):
        set_local_part(leaf, _Taken(leaf, taken))


class _Taken(torch.Tensor):
    """Stands where a donated shard was; no operator accepts it."""

    taken: str

    @staticmethod
    def __new__(cls, leaf: torch.Tensor, taken: str) -> "_Taken":
        made = torch.Tensor._make_wrapper_subclass(cls, leaf.shape, dtype=leaf.dtype)
        made.taken = taken
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<donated as {self.taken}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kw: Any = None
    ) -> NoReturn:
        leaves, _ = flatten([args, kw])
        held = next(leaf for leaf in leaves if isinstance(leaf, cls))
        raise DonatedError(_message("a tensor", held.taken))


def write_back(
    donated: list[torch.Tensor], results: list[torch.Tensor | None], others: list[Any]
) -> None:
    """Copy results into donated shards, in place in both lists.

    A result that still shares memory with a shard that is about to be written is cloned
    first, so that the order of the writes does not matter.

    Args:
        donated: Shards whose memory may be overwritten.
        results: For every shard the result that goes there, `None` for none.
        others: All other results; those that share memory are replaced by clones.
    """
    taken = {_storage(shard) for shard in donated}
    for n, other in enumerate(others):
        if isinstance(other, torch.Tensor) and _storage(other) in taken:
            others[n] = other.clone()
    for n, (shard, result) in enumerate(zip(donated, results, strict=True)):
        if result is not None and not result.is_set_to(shard):
            results[n] = result.clone() if _storage(result) in taken else result
    for n, (shard, result) in enumerate(zip(donated, results, strict=True)):
        if result is not None and _fits(shard, result):
            results[n] = shard.copy_(result) if not result.is_set_to(shard) else shard


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _fits(shard: torch.Tensor, result: torch.Tensor) -> bool:
    apart = 0 not in shard.stride()  # else elements share memory
    return apart and shard.shape == result.shape and shard.dtype == result.dtype
