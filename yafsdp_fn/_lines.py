"""The line of the user's own code that an operator or an error comes from."""

import os
import sys
import warnings
from types import FrameType, TracebackType

import optree
import torch

_SKIPPED = tuple(
    os.path.dirname(module.__file__ or "") + os.sep
    for module in (torch, optree, sys.modules[__package__])
) + tuple(f"{os.sep}{name}{os.sep}" for name in ("einops", "jaxtyping"))


def user_line(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame that is the user's own code."""
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _is_users(filename: str) -> bool:
    if filename.startswith("<frozen") or filename == "<string>":
        return False
    return not any(part in filename for part in _SKIPPED) and not filename.endswith(
        (f"{os.sep}contextlib.py", f"{os.sep}functools.py")
    )


def line_of(trace: TracebackType | None) -> str:
    line = "?"
    while trace is not None:
        if _is_users(trace.tb_frame.f_code.co_filename):
            line = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def warn(message: str, category: type[Warning]) -> None:
    """Warn on the user's line that called the library."""
    filename, _, number = user_line(sys._getframe(1)).rpartition(":")
    warnings.warn_explicit(message, category, filename, int(number or 0))
