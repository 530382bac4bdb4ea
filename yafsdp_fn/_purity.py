"""What a step may not do while it is traced, found by looking before and after."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ._arguments import name_of
from ._capture import captures
from ._errors import TraceError
from ._torch import is_traced


@contextmanager
def checked_purity(fn: Callable[..., Any]) -> Iterator[None]:
    """Refuse a step that leaves a traced tensor behind, or draws from Python.

    Args:
        fn: The step, which is traced inside of the context.

    Raises:
        TraceError: Says which of both.
    """
    before = _generators()
    yield
    name = name_of(fn)
    if before != _generators():
        raise TraceError(
            f"{name} draws from Python's or NumPy's random generator; every call would "
            "use the number that was drawn first. Draw it outside of the step and pass "
            "it as an argument."
        )
    if any(map(is_traced, captures(fn).tensors)):
        raise TraceError(
            f"{name} stores a tensor in something that it closes over (a list, a dict "
            "or an attribute), so it is no pure function. Return the tensor instead."
        )


def _generators() -> tuple[Any, ...]:
    """The states of the random generators that torch does not know of."""
    _, key, *rest = np.random.get_state()
    return random.getstate(), np.asarray(key).tobytes(), *rest
