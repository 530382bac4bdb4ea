"""Paging of gathered parameters: valid, optimal, bounded in work, and prefetched."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yafsdp_fn import _paging
from yafsdp_fn._errors import ArgumentError
from yafsdp_fn._paging import Stay, begins, least_memory, stays

Uses = Sequence[Sequence[int]]
Sizes = dict[int, int]

# --- what must hold -------------------------------------------------------------------


def total(groups: Any, sizes: Sizes) -> int:
    return sum(sizes[group] for group in set(groups))


def gathered(found: Sequence[Stay], sizes: Sizes) -> int:
    return sum(sizes[stay.group] for stay in found)


def covering(found: Sequence[Stay], event: int) -> list[int]:
    return [stay.group for stay in found if stay.first <= event <= stay.last]


def reserved(uses: Uses, sizes: Sizes, memory: float, ahead: int, event: int) -> set:
    """Groups of an event and of the most events after it that fit with it."""
    windows = [uses[event : event + 1 + more] for more in range(ahead + 1)]
    unions = [set().union(*window) for window in windows]
    return max((u for u in unions if total(u, sizes) <= memory), key=len)


def assert_valid(
    found: Sequence[Stay], uses: Uses, sizes: Sizes, memory: float, ahead: int = 0
) -> None:
    """Stays are in order, serve every use once, and fit with what is reserved."""
    assert found == sorted(found, key=lambda stay: (stay.first, stay.group))
    for stay in found:
        assert stay.group in uses[stay.first], "a stay begins before its first use"
        assert stay.group in uses[stay.last], "a stay ends after its last use"
    for event, used in enumerate(uses):
        there = covering(found, event)
        assert len(there) == len(set(there)), "a group is there twice"
        assert set(used) <= set(there), "a group is not there"
        room = reserved(uses, sizes, memory, ahead, event)
        assert total({*there, *room}, sizes) <= memory, "memory does not suffice"


def fewest(uses: Uses, sizes: Sizes, memory: float, ahead: int = 0) -> int:
    """Bytes that must be gathered, of all ways to keep groups from event to event."""
    costs: dict[frozenset[int], int] = {frozenset(): 0}
    for event, used in enumerate(uses):
        room = reserved(uses, sizes, memory, ahead, event)
        reached: dict[frozenset[int], int] = {}
        for held, cost in costs.items():
            cost += total(set(used) - held, sizes)
            optional = sorted(held - set(used))
            for choice in itertools.product((False, True), repeat=len(optional)):
                kept = frozenset([*used, *itertools.compress(optional, choice)])
                if total(kept | room, sizes) <= memory:
                    reached[kept] = min(cost, reached.get(kept, cost))
        costs = reached
    return min(costs.values())


CHAIN = [[0], [1], [2], [1], [0]]
EQUAL = {0: 1, 1: 1, 2: 1}
GOOD = [Stay(0, 0, 0), Stay(1, 1, 3), Stay(2, 2, 2), Stay(0, 4, 4)]


@pytest.mark.parametrize(
    "bad",
    [
        GOOD[::-1],  # order
        GOOD[:-1],  # a use without a stay
        [*GOOD[:-1], Stay(0, 3, 4)],  # begins before its first use
        [replace(GOOD[0], last=1), *GOOD[1:]],  # ends after its last use
        [Stay(0, 0, 4), *GOOD[1:]],  # twice
        [Stay(0, 0, 4), *GOOD[1:-1]],  # too much
    ],
)
def test_validity_can_fail(bad: list[Stay]) -> None:
    assert_valid(GOOD, CHAIN, EQUAL, 2)
    with pytest.raises(AssertionError):
        assert_valid(bad, CHAIN, EQUAL, 2)


def test_reserved_memory_can_be_exceeded() -> None:
    uses = [[0], [1], [2], [0]]
    kept = [Stay(0, 0, 3), Stay(1, 1, 1), Stay(2, 2, 2)]
    assert_valid(kept, uses, EQUAL, 2)
    with pytest.raises(AssertionError, match="memory"):
        assert_valid(kept, uses, EQUAL, 2, ahead=1)


def test_exhaustive_search_knows_the_chain() -> None:
    assert fewest(CHAIN, EQUAL, 1) == 5
    assert fewest(CHAIN, EQUAL, 2) == 4
    assert fewest(CHAIN, EQUAL, 3) == 3
    assert fewest(CHAIN, EQUAL, 3, ahead=1) == 3
    assert fewest([[0], [1], [2], [0]], EQUAL, 2) == 3
    assert fewest([[0], [1], [2], [0]], EQUAL, 2, ahead=1) == 4


# --- any sequence ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A sequence of events, and memory that suffices for each of them."""

    uses: Uses
    sizes: Sizes
    memory: float


@st.composite
def cases(draw: st.DrawFn, groups: int = 6, events: int = 16) -> Case:
    least = draw(st.sampled_from([0, 1]))  # a few events, or many that are not empty
    each = st.sampled_from(draw(st.sampled_from([(1,), (2, 3, 5), range(50)])))
    fewest = groups if least else 1
    drawn = draw(st.lists(each, min_size=fewest, max_size=groups))
    sizes = dict(enumerate(drawn))
    most = draw(st.sampled_from([1, 1, 3]))
    used = st.lists(st.sampled_from([*sizes]), min_size=least, max_size=most)
    uses = draw(st.lists(used, min_size=least * events, max_size=events))
    need = max((total(u, sizes) for u in uses), default=0)
    return Case(uses, sizes, draw(st.integers(need, sum(drawn))))


AHEAD = st.integers(0, 3)


@given(case=cases(), ahead=AHEAD)
def test_no_stays_gather_less(case: Case, ahead: int) -> None:
    found = stays(case.uses, case.sizes, case.memory, ahead)
    assert_valid(found, case.uses, case.sizes, case.memory, ahead)
    wanted = fewest(case.uses, case.sizes, case.memory, ahead)
    assert gathered(found, case.sizes) == wanted


@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 2**32))
def test_optimal_with_any_memory(seed: int) -> None:
    """Long sequences, on which simpler rules than the search gather more."""
    random = Random(seed)
    sizes = {group: random.choice((2, 3, 5)) for group in range(6)}
    uses = [[random.randrange(6)] for _ in range(20)]
    for memory in range(5, sum(sizes.values()) + 1):
        found = stays(uses, sizes, memory)
        assert gathered(found, sizes) == fewest(uses, sizes, memory)


@given(case=cases(), more=st.integers(0, 20))
def test_more_memory_gathers_no_more(case: Case, more: int) -> None:
    less = stays(case.uses, case.sizes, case.memory)
    found = stays(case.uses, case.sizes, case.memory + more)
    assert gathered(found, case.sizes) <= gathered(less, case.sizes)


@given(case=cases(groups=30, events=60), ahead=AHEAD, work=st.sampled_from([1, 500]))
def test_a_search_cut_short_is_valid(case: Case, ahead: int, work: int) -> None:
    with mock.patch.object(_paging, "_WORK", work):
        found = stays(case.uses, case.sizes, case.memory, ahead)
    assert_valid(found, case.uses, case.sizes, case.memory, ahead)


@given(case=cases(groups=30, events=60))
def test_equal_sizes_are_paged_as_by_belady(case: Case) -> None:
    sizes = dict.fromkeys(case.sizes, 7)
    need = max((len(set(used)) for used in case.uses), default=0)
    for room in range(need, len(sizes) + 1, 3):
        wanted = farthest_next_use(case.uses, room)
        assert len(stays(case.uses, sizes, 7 * room + 6)) == wanted


def farthest_next_use(uses: Uses, room: int) -> int:
    """Gathers of Belady's rule, for a number of groups that have room."""
    there: set[int] = set()
    gathers = 0
    for event, used in enumerate(uses):
        gathers += len(set(used) - there)
        there |= set(used)
        following = dict.fromkeys(there, len(uses))
        for later in reversed(range(event + 1, len(uses))):
            following.update(dict.fromkeys(uses[later], later))
        while len(there) > room:
            there.remove(max(there - set(used), key=following.__getitem__))
    return gathers


@given(case=cases(groups=30, events=60), ahead=AHEAD)
def test_infinite_memory_gathers_once(case: Case, ahead: int) -> None:
    with mock.patch.object(_paging, "_Search", side_effect=AssertionError):
        found = stays(case.uses, case.sizes, math.inf, ahead)
    assert_valid(found, case.uses, case.sizes, math.inf, ahead)
    assert len(found) == len(set().union(*case.uses))


@given(case=cases(groups=8, events=40), ahead=AHEAD)
def test_default_memory_gathers_at_most_twice(case: Case, ahead: int) -> None:
    memory = least_memory(case.uses, case.sizes, ahead)
    used = set().union(*case.uses)
    two = sum(sorted(case.sizes[group] for group in used)[-2:])
    need = max((total(u, case.sizes) for u in case.uses), default=0)
    assert isinstance(memory, int)
    assert max(two, need) <= memory <= total(used, case.sizes)
    found = stays(case.uses, case.sizes, memory, ahead)
    assert max(Counter(stay.group for stay in found).values(), default=0) <= 2


@given(case=cases(), more=st.sampled_from([0, 2, 60]), prefetch=AHEAD)
def test_gathers_begin_in_order_as_early_as_they_can(
    case: Case, more: int, prefetch: int
) -> None:
    memory = case.memory + more
    found = stays(case.uses, case.sizes, case.memory)
    starts = begins(found, case.uses, case.sizes, memory, prefetch)
    assert starts == sorted(starts)
    held = [replace(stay, first=b) for stay, b in zip(found, starts, strict=True)]
    there = [covering(held, event) for event in range(len(case.uses))]
    loads = [sum(case.sizes[group] for group in groups) for groups in there]
    assert max(loads, default=0) <= memory
    free: dict[int, int] = {}
    before = 0
    for stay, start in zip(found, starts, strict=True):
        earliest = max(stay.first - prefetch, free.get(stay.group, 0), before)
        assert earliest <= start <= stay.first
        if start > earliest:  # what keeps it from beginning at the event before
            assert loads[start - 1] + case.sizes[stay.group] > memory
        free[stay.group], before = stay.last + 1, start


@given(case=cases(), ahead=AHEAD)
def test_what_has_room_reserved_is_prefetched(case: Case, ahead: int) -> None:
    uses, sizes, memory = case.uses, case.sizes, case.memory
    found = stays(uses, sizes, memory, ahead)
    starts = begins(found, uses, sizes, memory, ahead)
    for stay, start in zip(found, starts, strict=True):
        for event in range(max(0, stay.first - ahead), start):
            window = set().union(*uses[event : stay.first + 1])
            assert total(window, sizes) > memory


# --- known sequences ------------------------------------------------------------------


def forward_backward(sizes: Sequence[int]) -> tuple[Uses, Sizes]:
    forward = [[group] for group in range(len(sizes))]
    return [*forward, *forward[::-1]], dict(enumerate(sizes))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("layers", [2, 3, 10])
def test_two_buffers_alternate(layers: int, ahead: int) -> None:
    uses, sizes = forward_backward([5] * layers)
    assert least_memory(uses, sizes, ahead) == 10
    found = stays(uses, sizes, 10, ahead)
    assert len(found) == 2 * layers - 2
    starts = begins(found, uses, sizes, 10, prefetch=1)
    # each gather runs under the layer before, and the last layer stays
    assert starts == [max(0, stay.first - 1) for stay in found]
    at_first = begins(found, uses, sizes, 10, prefetch=0)
    assert at_first == [stay.first for stay in found]


def test_one_buffer_gathers_when_needed() -> None:
    uses, sizes = forward_backward([5] * 4)
    found = stays(uses, sizes, 5, ahead=1)
    assert len(found) == 7
    assert begins(found, uses, sizes, 5, prefetch=1) == [0, 1, 2, 3, 5, 6, 7]


def test_farthest_next_use_is_evicted() -> None:
    uses = [[0], [1], [2], [0], [3]]
    found = stays(uses, dict.fromkeys(range(4), 1), memory=2)
    assert found == [Stay(0, 0, 3), Stay(1, 1, 1), Stay(2, 2, 2), Stay(3, 4, 4)]


def test_a_small_group_goes_if_that_is_enough() -> None:
    uses, sizes = [[0], [1], [2], [1], [0]], {0: 9, 1: 1, 2: 1}
    assert stays(uses, sizes, memory=10)[-1] == Stay(1, 3, 3)
    assert gathered(stays(uses, sizes, memory=10), sizes) == 12


def test_a_step_with_three_passes_gets_more_memory() -> None:
    uses = [[n] for n in [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]]
    sizes = dict.fromkeys(range(4), 1)
    assert least_memory(uses, sizes, 0) == 3
    assert least_memory([[0], [0]], {0: 4}, 1) == 4
    assert least_memory([[0, 1, 2]], {0: 4, 1: 4, 2: 4}, 1) == 12
    assert least_memory([], {}, 1) == 0


@pytest.mark.parametrize("memory", [0, 11, 11.5])
def test_too_little_memory(memory: float) -> None:
    wanted = rf"gather_memory={memory}\): .* 12 bytes .* gather_memory=12 "
    with pytest.raises(ArgumentError, match=wanted):
        stays([[0], [0, 1], [1]], {0: 8, 1: 4}, memory)


def test_work_is_bounded() -> None:
    """A model of 32 layers whose leaves are groups looks at few states."""
    leaves = [4096 * n for n in (1, 4096, 1024, 1024, 4096, 1, 14336, 14336, 14336)]
    vocabulary = 4096 * 128256
    uses, sizes = forward_backward([vocabulary, *leaves * 32, 4096, vocabulary])
    evictions = _paging._Search.evictions
    for part in (0.1, 0.5):
        memory = vocabulary + part * sum(leaves * 32)
        with mock.patch.object(_paging._Search, "evictions", autospec=True) as looked:
            looked.side_effect = evictions
            found = stays(uses, sizes, memory, ahead=1)
        assert looked.call_count < _paging._WORK
        assert_valid(found, uses, sizes, memory, ahead=1)
        # nearly what a model in bytes instead of groups must gather
        least = 2 * sum(sizes.values()) - memory
        assert least <= gathered(found, sizes) < 1.01 * least
