"""Writing a random program, line by line, by executing it.

While it is written a step is executed, which keeps it well conditioned: values are
bounded, what is compared or sorted is kept apart, and nothing is divided by almost
zero.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

import yafsdp_fn as yf

Recipe = tuple[str, tuple[int, ...]]

# --- inputs ---------------------------------------------------------------------------


def rand(*shape: int, seed: int) -> Tensor:
    """Normal numbers, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def ints(high: int, *shape: int, seed: int) -> Tensor:
    """Integers below `high`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator)


def bools(*shape: int, seed: int) -> Tensor:
    """Truth values; the first is true."""
    mask = ints(2, *shape, seed=seed).bool()
    return mask | (torch.arange(mask.numel()).view(mask.shape) == 0)


# What a program knows.
NAMES: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "math": math,
    "yf": yf,
    "rand": rand,
    "ints": ints,
    "bools": bools,
    "grad": grad,
    "grad_and_value": grad_and_value,
    "vmap": vmap,
}


# --- writing a program ----------------------------------------------------------------


class SkipError(Exception):
    """A recipe finds no operands, or its result is not fit for a comparison."""


_LARGEST = 700  # elements of a value
_BOUND = 4.0  # magnitude above which a value is passed through tanh
_APART = 1e-5  # least distance of values that are compared with each other


@dataclass
class Writer:
    """The values of a step so far, and the lines that made them."""

    values: dict[str, Tensor] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    # --- choices ---

    def choose(self, count: int) -> int:
        """The next number of the recipe, below `count`; 0 where the numbers end."""
        return self.numbers.pop(0) % count if self.numbers else 0

    def among(self, options: Sequence[Any]) -> Any:
        if not options:
            raise SkipError
        return options[self.choose(len(options))]

    def pick(self, test: Callable[[Tensor], bool]) -> str:
        """The name of a value that passes a test; the latest one comes first."""
        return self.among([n for n in reversed(self.values) if test(self.values[n])])

    def real(self, test: Callable[[Tensor], bool] = lambda x: True) -> str:
        return self.pick(lambda x: x.dtype == torch.float64 and test(x))

    def array(self, rank: int = 1) -> str:
        """A real value with at least `rank` dimensions."""
        return self.real(lambda x: x.dim() >= rank)

    def indices(self, below: int, test: Callable[[Tensor], bool]) -> str:
        """Integers that index a dimension of length `below`."""
        return self.pick(
            lambda x: (
                x.dtype == torch.int64
                and x.numel() > 0
                and int(x.min()) >= 0
                and int(x.max()) < below
                and test(x)
            )
        )

    def mask(self, shape: torch.Size) -> str:
        """Truth values that can be broadcast to a shape."""
        return self.pick(lambda x: x.dtype == torch.bool and broadcasts(x.shape, shape))

    def dim(self, name: str) -> int:
        """A dimension of a value, counted from either end."""
        rank = self.values[name].dim()
        chosen = self.choose(2 * rank)
        return chosen if chosen < rank else chosen - 2 * rank

    def dims(self, name: str) -> list[int]:
        """Some dimensions of a value, at least one."""
        rank = self.values[name].dim()
        some = [
            list(c)
            for count in range(1, rank + 1)
            for c in itertools.combinations(range(rank), count)
        ]
        return self.among(some)

    # --- conditions ---

    def apart(self, name: str, dims: Sequence[int]) -> None:
        """Require that no two values along `dims` are nearly the same."""
        value = self.values[name]
        front = value.movedim(list(dims), list(range(len(dims))))
        flat, _ = front.flatten(0, len(dims) - 1).sort(0)
        if flat.shape[0] > 1 and flat.diff(dim=0).min() < _APART:
            raise SkipError

    def away(self, name: str, *points: float) -> None:
        """Require that no value is nearly one of the points."""
        if any((self.values[name] - p).abs().min() < _APART for p in points):
            raise SkipError

    # --- lines ---

    def evaluate(self, expression: str) -> Tensor:
        return eval(expression, {**NAMES, **self.values})

    def add(self, name: str, expression: str) -> None:
        """Write a line, if its value is fit for the rest of the step."""
        try:
            value = self.evaluate(expression)
        except (RuntimeError, IndexError, ValueError):  # its shapes do not fit
            raise SkipError from None
        if value.numel() == 0 or value.numel() > _LARGEST or value.dim() > 4:
            raise SkipError
        if value.dtype == torch.float64:
            largest = value.abs().max().item()
            if not 1e-3 < largest < 1e6:
                raise SkipError
            if largest > _BOUND:
                expression = f"({expression}).tanh()"
        self.values[name] = self.evaluate(expression)
        shape = list(self.values[name].shape)
        self.lines.append(f"{name} = {expression}  # {shape}")

    def follow(self, recipes: Sequence[Recipe], table: Any, prefix: str) -> list[str]:
        """Write a line for every recipe that fits; the names of what they made."""
        names = []
        for number, (kind, numbers) in enumerate(recipes):
            self.numbers = list(numbers)
            name = f"{prefix}{number}"
            try:
                self.add(name, table[kind](self))
            except SkipError:
                continue
            names.append(name)
        return names


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a shape can be broadcast to another one."""
    try:
        return torch.broadcast_shapes(shape, target) == torch.Size(target)
    except RuntimeError:
        return False


def meets(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes can be broadcast to one that is not too large."""
    try:
        return math.prod(torch.broadcast_shapes(shape, other)) <= _LARGEST
    except RuntimeError:
        return False


# --- tables ---------------------------------------------------------------------------

Write = Callable[[Writer], str]  # the expression of one more line
Table = dict[str, Write]


def entered_in(table: Table) -> Callable[[Write], Write]:
    """A decorator that enters a function into a table, by its name."""

    def enter(write: Write) -> Write:
        table[write.__name__] = write
        return write

    return enter
