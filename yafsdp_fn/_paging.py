"""Which groups of gathered parameters stay in memory between their uses.

This is paging with a known future: of groups of one size, that whose next use is
farthest goes first (Belady, A study of replacement algorithms for a virtual-storage
computer, IBM Systems Journal 5, 1966). Since sizes differ, how many of each size go is
searched for.
"""

import heapq
import itertools
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ._errors import ArgumentError

Uses = Sequence[Collection[int]]  # the groups that every event needs at once
Sizes = Mapping[int, int]  # bytes of every group

_WORK = 2**15  # bounds a search: its events, times sizes, times states at an event


@dataclass(frozen=True)
class Stay:
    """A group is in memory from one event to another, gathered once."""

    group: int
    first: int  # event at whose begin it must be there
    last: int  # last event of this stay that uses it


def stays(uses: Uses, sizes: Sizes, memory: float, ahead: int = 0) -> list[Stay]:
    """The stays, by first event, then group, that gather the fewest bytes.

    Optimal, unless there are too many ways to look at: then the cheapest are pursued
    from event to event, and what is found is no worse than to evict what is used
    farthest ahead. More memory makes an optimum no worse, if no more is reserved of it.

    Args:
        uses: The groups that every event needs at once, in program order.
        sizes: Bytes of every group.
        memory: Bytes of groups alive at once.
        ahead: For how many of the events that follow room is reserved as well, so that
            their groups can be prefetched; for fewer where they do not fit.

    Raises:
        ArgumentError: An event needs more than `memory`.
    """
    need = max((_bytes(used, sizes) for used in uses), default=0)
    if need > memory:
        raise ArgumentError(
            f"Schedule(gather_memory={memory}): one operator needs {need} bytes of "
            f"gathered parameters; write gather_memory={need} at least, or None."
        )
    windows = (uses[event : event + ahead + 1] for event in range(len(uses)))
    rooms = [_room(window, sizes, memory) for window in windows]
    evicted = {(gap.stop, gap.group) for gap in _evicted(rooms, sizes, memory)}
    found: list[Stay] = []
    current: dict[int, int] = {}  # position of a group's stay
    for event, used in enumerate(uses):
        for group in rooms[event]:
            if (event, group) in evicted:
                del current[group]
        for group in sorted(set(used)):
            if current.setdefault(group, len(found)) == len(found):
                found.append(Stay(group, event, event))
            found[current[group]] = replace(found[current[group]], last=event)
    return found


def begins(
    stays: Sequence[Stay], uses: Uses, sizes: Sizes, memory: float, prefetch: int
) -> list[int]:
    """The events at whose begin gathers start: as early as their memory is free.

    Memory goes to what is needed first: no gather starts before one that is needed
    earlier, nor while its group is in memory from the stay before. At most `prefetch`
    events lie between its start and its first use; those without a group count as well.
    """
    spans = ((stay.first, stay.last + 1, sizes[stay.group]) for stay in stays)
    loads = _loads(spans, len(uses))
    free: dict[int, int] = {}  # the event after a group's stay
    found: list[int] = []
    for stay in stays:
        begin, size = stay.first, sizes[stay.group]
        earliest = max(begin - prefetch, free.get(stay.group, 0), *found[-1:])
        while begin > earliest and loads[begin - 1] + size <= memory:
            begin -= 1
            loads[begin] += size
        free[stay.group] = stay.last + 1
        found.append(begin)
    return found


def least_memory(uses: Uses, sizes: Sizes, ahead: int) -> int:
    """The memory to take by default: two buffers, enlarged if a step needs it.

    Two buffers for the largest groups are YaFSDP's: in turns, one holds the group that
    is computed with while the next is gathered into the other. Each group is gathered
    once in forward and once in backward. Where two make `stays` gather a group more
    often, they grow until it does not, in steps of 1/256 of all groups' bytes.
    """

    def suffices(memory: int) -> bool:
        gathers = Counter(stay.group for stay in stays(uses, sizes, memory, ahead))
        return max(gathers.values(), default=0) <= 2

    used = {group for event in uses for group in event}
    need = max((_bytes(event, sizes) for event in uses), default=0)
    least = max(need, sum(heapq.nlargest(2, (sizes[group] for group in used))))
    if suffices(least):
        return least
    whole = _bytes(used, sizes)
    step = max(1, whole // 256)
    candidates = range(least, whole + step, step)
    return min(whole, candidates[bisect_left(candidates, True, key=suffices)])


def _bytes(groups: Iterable[int], sizes: Sizes) -> int:
    return sum(sizes[group] for group in set(groups))


def _loads(spans: Iterable[tuple[int, int, int]], events: int) -> list[int]:
    """Bytes at every event, of spans from an event to before another."""
    change = [0] * (events + 1)
    for start, stop, size in spans:
        change[start] += size
        change[stop] -= size
    return [*itertools.accumulate(change[:-1])]


# --- gaps between uses ----------------------------------------------------------------


@dataclass(frozen=True)
class _Gap:
    """The events between two uses of a group, over which it is kept or evicted."""

    group: int
    start: int  # the first of these events
    stop: int  # the event that uses the group again
    size: int


def _room(window: Uses, sizes: Sizes, memory: float) -> set[int]:
    """The groups of the first event, and of as many that follow as fit."""
    room = set(window[0])
    for used in window[1:]:
        if _bytes(room.union(used), sizes) > memory:
            break
        room.update(used)
    return room


def _gaps(rooms: Sequence[set[int]], sizes: Sizes) -> Iterator[_Gap]:
    """The gaps, in the order in which they end."""
    after: dict[int, int] = {}
    for event, room in enumerate(rooms):
        for group in sorted(room):
            if after.get(group, event) < event and sizes[group]:
                yield _Gap(group, after[group], event, sizes[group])
            after[group] = event + 1


def _evicted(rooms: Sequence[set[int]], sizes: Sizes, memory: float) -> list[_Gap]:
    """The gaps of fewest bytes without which all others fit into memory."""
    gaps = list(_gaps(rooms, sizes))
    loads = _loads(((gap.start, gap.stop, gap.size) for gap in gaps), len(rooms))
    spare = [memory - _bytes(room, sizes) for room in rooms]
    tight = [event for event, load in enumerate(loads) if load > spare[event]]
    if not tight:
        return []
    search = _Search(gaps, tight, spare)
    [farthest] = search.run(1, math.inf)
    width = max(1, _WORK // len(tight) // len(search.by_size))
    _, chosen = min([farthest, *search.run(width, farthest[0])])
    return [gap for number, gap in enumerate(gaps) if chosen >> number & 1]


@dataclass
class _Search:
    """Goes through the events at which not all gaps can be kept.

    A set of gaps is an integer: bit n is gap n, so that the highest ends last. A state
    is the bytes of the gaps that are evicted until an event, and the set of them.
    """

    gaps: Sequence[_Gap]
    tight: Sequence[int]
    spare: Sequence[float]

    def __post_init__(self) -> None:
        change = [0] * (self.gaps[-1].stop + 1)
        by_size: defaultdict[int, int] = defaultdict(int)
        for number, gap in enumerate(self.gaps):
            change[gap.start] ^= 1 << number
            change[gap.stop] ^= 1 << number
            by_size[gap.size] |= 1 << number
        self.by_size = sorted(by_size.items(), reverse=True)
        self.open = [*itertools.accumulate(change, int.__xor__)]

    def run(self, width: int, bound: float) -> list[tuple[float, int]]:
        """States after all events; at each, only the cheapest are pursued."""
        states: list[tuple[float, int]] = [(0, 0)]
        for event, later in itertools.pairwise([*self.tight, self.gaps[-1].stop]):
            lasting = self.open[event] & self.open[later]
            cheapest: dict[int, tuple[float, int]] = {}
            tries = 1 + 2 * (width - 1) // max(1, len(states))
            for cost, gone in states:
                for out in itertools.islice(self.evictions(event, gone), tries):
                    new = cost + self.bytes(out), gone | out
                    if new < cheapest.get(new[1] & lasting, (bound, 0)):
                        cheapest[new[1] & lasting] = new
            states = heapq.nsmallest(width, cheapest.values())
        return states

    def evictions(self, event: int, gone: int) -> Iterator[int]:
        """Sets to evict at an event; the first is of what is used farthest ahead."""
        kept, far = self.open[event] & ~gone, 0
        excess = self.bytes(kept) - self.spare[event]
        while self.bytes(far) < excess:
            far |= 1 << ((kept ^ far).bit_length() - 1)
        yield next(self.minimal(far, excess, 0))
        if far:
            yield from self.minimal(kept, excess, 0)

    def minimal(self, kept: int, excess: float, rank: int) -> Iterator[int]:
        """Sets to evict without a superfluous gap, of a size and the smaller ones."""
        if excess <= 0:
            yield 0
            return
        size, members = self.by_size[rank]
        smaller = self.bytes(kept, rank + 1)
        outs, mine = [0], kept & members
        while mine and size * (len(outs) - 1) < excess:
            top = 1 << (mine.bit_length() - 1)
            outs, mine = [*outs, outs[-1] | top], mine ^ top
        for count in reversed(range(len(outs))):
            lacking = excess - size * count
            if lacking > smaller:
                return
            for more in self.minimal(kept, lacking, rank + 1):
                yield outs[count] | more

    def bytes(self, gaps: int, rank: int = 0) -> int:
        """Bytes of gaps, of a size and the smaller ones."""
        sizes = self.by_size[rank:]
        return sum(size * (gaps & members).bit_count() for size, members in sizes)
