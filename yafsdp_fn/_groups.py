"""Which leaves are gathered together, and which operators belong to their gathers.

A group is what stands under one layer of the model: its leaves are gathered by one
collective, stay together and go together. YaFSDP and FSDP's units are the same, named
by modules; here a leaf's path says it.
"""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from . import _rules
from ._errors import ArgumentError
from ._graph import Ref
from ._lower import Local as Step
from ._program import Adjust, Compute, Local, Transfer
from ._shapes import packed_bytes

GroupBy = Callable[[str], Hashable]
SMALL = "small leaves"
_SMALL_BYTES = 1 << 16  # a leaf with one dimension and no more joins the small leaves


def layer_of(path: str) -> str:
    """The group of a leaf by default: its layer, else its top-level key.

    A layer is the first number in a path, the second one if an argument is a tuple;
    else the first key that ends in a number.

    >>> layer_of("params['layers'][3]['mlp']['up']")
    "params['layers'][3]"
    >>> layer_of("state[0]['layers'][3]['mlp']['up']")
    "state[0]['layers'][3]"
    >>> layer_of("params['model.layers.3.mlp.up_proj.weight']")
    "params['model.layers.3"
    >>> layer_of("params['block_2']['weight']")
    "params['block_2']"
    >>> layer_of("params['embedding']['weight']")
    "params['embedding']"
    """
    keys = list(_KEY.finditer(path))
    numbers = [n for n, key in enumerate(keys) if key[1].isdigit()]
    suffixed = [n for n, key in enumerate(keys) if key[1][-1].isdigit()]
    if numbers:
        layer = numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]
    else:
        layer = suffixed[0] if suffixed else min(1, len(keys) - 1)
        if not suffixed:  # a key with its dots: the leaf of a module
            layer = next((n for n, key in enumerate(keys) if key[2] != ""), layer)
    return path[: keys[layer].end()] if keys else path


# A key with what closes it; dots inside of a quoted key part it as they do outside.
_KEY = re.compile(r"([^\[\]'\".]+)(['\"]?\]?)")


# --- what belongs to gathers ----------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """The steps of a rank's graph that gathers are made of, by their position.

    Attributes:
        steps: The rank's graph.
        values: What is known of its values.
        returned: Numbers of the values that are handed back.
        axes: The number of ranks along each mesh axis.
        group_by: From the path of a leaf to what it is gathered with.
    """

    steps: Sequence[Step]
    values: Mapping[int, Local]
    returned: frozenset[int]
    axes: Sequence[int]
    group_by: GroupBy = layer_of

    @cached_property
    def maker(self) -> dict[int, int]:
        """The position of the step that makes a value."""
        return {r.id: n for n, step in enumerate(self.steps) for r in step.writes}

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """The positions of the steps that read a value."""
        found: dict[int, list[int]] = {}
        for position, step in enumerate(self.steps):
            for ref in step.reads:
                found.setdefault(ref.id, []).append(position)
        return found

    def behind(self, position: int) -> list[int]:
        """The positions of the steps that made what a step reads."""
        reads = self.steps[position].reads
        return [self.maker[ref.id] for ref in reads if ref.id in self.maker]

    @cached_property
    def members(self) -> frozenset[int]:
        """Gathers of state, and what is replayed on gathered values alone."""
        found: set[int] = set()
        for position, step in enumerate(self.steps):
            behind = self.behind(position)
            inside = [m for m in behind if m in found]
            replayed = _is_replay(step) and 0 < len(inside) == len(behind)
            kept = any(r.id in self.returned for r in step.writes)
            if (is_gather(step) or replayed) and not kept:
                found.add(position)
        return frozenset(found)

    @cached_property
    def feeders(self) -> frozenset[int]:
        """What is computed on shards for gathers alone, such as a conversion."""
        ready: set[int] = set()
        for position, step in enumerate(self.steps):
            if _is_light(step) and all(m in ready for m in self.behind(position)):
                ready.add(position)
        found: set[int] = set()
        for position in sorted(ready, reverse=True):
            written = self.steps[position].writes
            users = [n for ref in written for n in self.readers.get(ref.id, ())]
            gathered = users and all(n in self.members or n in found for n in users)
            if gathered and not any(r.id in self.returned for r in written):
                found.add(position)
        return frozenset(found)

    @cached_property
    def ready(self) -> dict[int, int]:
        """For every gather, the last step of the program that its operand waits for."""
        found: dict[int, int] = {}
        for position in range(len(self.steps)):
            if position in self.members or position in self.feeders:
                waits = (found.get(m, m) for m in self.behind(position))
                found[position] = max(waits, default=-1)
        return found

    @cached_property
    def number(self) -> dict[int, int]:
        """The group of every member.

        A leaf whose operand is ready only after the first use of its group, such as
        one that the step has updated, begins a group of its own.
        """
        found: dict[int, int] = {}
        opened: dict[Hashable, tuple[int, int]] = {}  # the number and the first use
        count = 0
        for position in sorted(self.members):
            inside = [m for m in self.behind(position) if m in self.members]
            if inside:  # with the largest of what it is made of
                found[position] = found[max(inside, key=self._nbytes)]
                continue
            key = self._key(position)
            group, first = opened.get(key, (-1, -1))
            if group < 0 or self.ready[position] > first:
                group, count = count, count + 1
                opened[key] = (group, position)
            found[position] = group
        return found

    @cached_property
    def small(self) -> frozenset[int]:
        """The groups of small leaves, which stay from their first use to the last."""
        inputs = [m for m in self.members if is_gather(self.steps[m])]
        return frozenset(self.number[m] for m in inputs if self._key(m) == SMALL)

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes of every group on a rank while it is gathered."""
        found: dict[int, int] = {}
        for position, group in self.number.items():
            found[group] = found.get(group, 0) + self._nbytes(position)
        return found

    def needed(self, ref: Ref) -> frozenset[int]:
        """The members that a value is made of."""
        position = self.maker.get(ref.id, -1)
        return self._closure[position] if position in self.members else frozenset()

    @cached_property
    def _closure(self) -> dict[int, frozenset[int]]:
        found: dict[int, frozenset[int]] = {}
        for position in sorted(self.members):
            behind = (found[m] for m in self.behind(position) if m in self.members)
            found[position] = frozenset({position}).union(*behind)
        return found

    def _key(self, position: int) -> Hashable:
        step = self.steps[position]
        path = step.labels[0] if isinstance(step, Transfer) else ""
        (target,) = step.writes
        meta = self.values[target.id].meta
        if not path:
            return position
        if len(meta.shape) <= 1 and meta.nbytes <= _SMALL_BYTES:
            return SMALL
        return "chosen", _chosen(self.group_by, path)

    def _nbytes(self, position: int) -> int:
        step = self.steps[position]
        if isinstance(step, Compute) and step.op in _rules.VIEWS:
            return 0
        metas = [self.values[r.id].meta for r in step.writes]
        if isinstance(step, Transfer):  # shards are padded, so that they are equal
            ranks = self.axes[step.axis]
            cuts = zip(metas, step.cuts, strict=True)
            return sum(max(m.nbytes, packed_bytes(m, c, ranks)) for m, c in cuts)
        return sum(meta.nbytes for meta in metas)


def _chosen(group_by: GroupBy, path: str) -> Hashable:
    key = group_by(path)
    try:
        hash(key)
    except TypeError:
        raise ArgumentError(
            f"Schedule(group_by=...) gives {key!r} for {path}, which is not hashable. "
            "Return a string, a number, or a tuple of them."
        ) from None
    return key


def is_gather(step: Step) -> bool:
    """Whether a step gathers state."""
    return isinstance(step, Transfer) and step.kind == "all_gather" and step.planned


def _is_replay(step: Step) -> bool:
    return isinstance(step, Compute) and step.replay


def _is_light(step: Step) -> bool:
    """Whether to compute a step again for every gather."""
    return isinstance(step, Adjust) or (
        isinstance(step, Compute) and bool(step.reads) and _rules.is_local(step.op)
    )
