"""The placed graph: what `place` hands to `lower`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._graph import Node, Ref
from ._layout import Meta, Pending, Placements, Split
from ._sharding import Sharding

# --- moves ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AllGather:
    """Ranks of an axis exchange their parts of `dim`."""

    axis: int
    dim: int
    chunk: int


@dataclass(frozen=True)
class ReduceScatter:
    """Sum over the ranks of an axis; each keeps its part of `dim`."""

    axis: int
    dim: int
    chunk: int


@dataclass(frozen=True)
class AllReduce:
    """Sum, maximum or minimum over the ranks of an axis."""

    axis: int
    op: str


@dataclass(frozen=True)
class Slice:
    """A rank's own part of a value that it holds whole; moves nothing."""

    axis: int
    dim: int
    chunk: int


@dataclass(frozen=True)
class First:
    """A whole value as a pending sum: rank 0 keeps it, the others hold zeros."""

    axis: int


Collective = AllGather | ReduceScatter | AllReduce
Move = Collective | Slice | First

# --- values and steps -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Value:
    """A value with its placement.

    `family` is shared by all placements of the same global value; `batch` tells that
    its splits come from the batch, so that it must not move; `label` is the path of the
    leaf that it was made from. `constant` is the operator that makes a value of
    constants in any placement; `seeded` tells that small values go into it as well,
    such as a random key.
    """

    ref: Ref
    meta: Meta
    placements: Placements
    family: int
    batch: bool = False
    label: str = ""
    made_by: "Step | None" = None
    constant: Node | None = None
    seeded: bool = False

    @property
    def is_free(self) -> bool:
        """Made of constants, and not made yet."""
        return self.constant is not None and self.made_by is None

    @property
    def is_split(self) -> bool:
        return any(isinstance(p, Split) for p in self.placements)

    @property
    def is_pending(self) -> bool:
        return any(isinstance(p, Pending) for p in self.placements)


@dataclass(frozen=True, eq=False)
class Step:
    """An operator or a move on placed values.

    `planned` is false for a collective that none of rules 1 and 2 asked for; `replay`
    marks what is recomputed on gathered values.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Value, ...]
    outputs: tuple[Ref | None, ...]
    line: str = ""
    sharding: Sharding | None = None
    planned: bool = True
    replay: bool = False


@dataclass(frozen=True)
class Placed:
    """A placed graph: what `place` hands to `lower`."""

    sizes: tuple[int, ...]
    inputs: tuple[Value, ...]
    steps: tuple[Step, ...]
    values: Mapping[int, Value]
    outputs: tuple[Value | None, ...]
