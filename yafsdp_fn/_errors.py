"""The one family of errors: what was found, where, and what to write instead."""


class YafsdpError(Exception):
    """Base of every error that this library raises on a user's input.

    The message names the argument's path or the user's file and line, says what was
    found and what was needed, and ends with what to write instead.
    """


class ArgumentError(YafsdpError, ValueError):
    """An argument that cannot be used: no mesh, two meshes, a wrong shape or axis."""


class TraceError(YafsdpError, RuntimeError):
    """A step that is not pure or cannot be traced: the user's line and the remedy."""


class DonatedError(YafsdpError, RuntimeError):
    """A tree was used after its memory had been donated to an earlier call."""


class MismatchError(YafsdpError, RuntimeError):
    """The ranks do not hold the same program; says which ranks and what differs."""


class ProgramError(YafsdpError, AssertionError):
    """A program breaks its specification: a defect of this library, never of a step."""


class RetraceWarning(UserWarning):
    """State comes out of a step unlike it went in: every call traces the step again."""
