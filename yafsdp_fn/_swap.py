"""Other tensors in the place of those that a function closes over."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Swap(TorchFunctionMode):
    """While it is entered, torch functions see other tensors in the place of some.

    Args:
        swaps: The tensor that stands in, by the `id` of the one it stands in for.
    """

    def __init__(self, swaps: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.swaps = swaps

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not self.swaps:
            return func(*args, **(kwargs or {}))
        return func(*self._swap(args), **self._swap(kwargs or {}))

    def _swap(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.swaps.get(id(value), value)
        if isinstance(value, dict):
            return {k: self._swap(v) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._swap(v) for v in value)
        return value
