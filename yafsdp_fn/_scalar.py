"""Python floats as live inputs: a new learning rate is no new program."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class ValueReadError(Exception):
    """The step needs the float itself: it becomes a static value of the program."""


class LiveFloat:
    """Stands for a Python float argument while a step is traced.

    It has a float's arithmetic and type promotion, over a 0-dim float64 tensor. What
    needs the number itself (`float(x)`, `x > 0`, an argument that torch takes only as a
    number) raises an error; the step is then traced once more with the float as a
    constant, and again for every new value of it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that isinstance(x, float) holds, as for a float
        return float

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        dtype = _weak_dtype(tensors)
        lowered = [a.cast(dtype) if isinstance(a, cls) else a for a in args]
        named = {
            k: a.cast(dtype) if isinstance(a, cls) else a
            for k, a in (kwargs or {}).items()
        }
        return func(*lowered, **named)

    def cast(self, dtype: torch.dtype) -> torch.Tensor:
        """The 0-dim tensor in `dtype`."""
        return self.tensor.to(dtype)

    def _read(self, *_: Any) -> Any:
        raise ValueReadError

    __float__ = __int__ = __bool__ = __index__ = __hash__ = _read
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _read
    __round__ = __floor__ = __ceil__ = __trunc__ = __format__ = _read


def _weak_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype that leaves the result's dtype what a Python float leaves it.

    Beside a float tensor with dimensions a 0-dim float64 changes nothing; beside
    integers or 0-dim tensors alone it would promote to float64.
    """
    if any(t.dim() > 0 and not _is_integral(t) for t in tensors) or not tensors:
        return torch.float64
    dtypes = [t.dtype.to_real() for t in tensors if not _is_integral(t)]
    return functools.reduce(torch.promote_types, dtypes or [torch.get_default_dtype()])


def _is_integral(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _binary(op: Callable[[Any, Any], Any], swapped: bool) -> Callable[..., Any]:
    def method(self: LiveFloat, other: Any) -> Any:
        if isinstance(other, LiveFloat):
            other = other.tensor
        elif isinstance(other, bool) or not isinstance(other, int | float):
            return NotImplemented
        pair = (other, self.tensor) if swapped else (self.tensor, other)
        return LiveFloat(op(*pair))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    _op = getattr(operator, _name)
    setattr(LiveFloat, f"__{_name}__", _binary(_op, swapped=False))
    setattr(LiveFloat, f"__r{_name}__", _binary(_op, swapped=True))
for _name in ("neg", "abs", "pos"):
    _op = getattr(operator, _name)
    setattr(
        LiveFloat, f"__{_name}__", lambda self, _op=_op: LiveFloat(_op(self.tensor))
    )
