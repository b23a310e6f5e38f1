"""What goes first: a pure decision."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pipegraph.storage.space import CacheEntry, NextUse, eviction_order


def entry(name: str, used: int = 0) -> CacheEntry:
    return CacheEntry(name, 1, used)


def plan_of(uses: Sequence[str], now: int) -> NextUse:
    rest = list(uses[now:])
    return lambda name: rest.index(name) if name in rest else math.inf


def order(uses: Sequence[str], now: int, entries: list[CacheEntry], incoming: float = 0.0) -> str:
    return "".join(e.name for e in eviction_order(entries, plan_of(uses, now), incoming))


def test_the_entry_whose_next_use_lies_farthest_ahead_goes_first() -> None:
    assert order("abcabc", 0, [entry("b"), entry("c")]) == "cb"
    assert order("abccab", 2, [entry("a"), entry("b")]) == "ba"


def test_what_is_never_used_again_goes_before_all_others_oldest_first() -> None:
    assert order("abc", 0, [entry("b"), entry("x", 5), entry("c"), entry("y", 3)]) == "yxcb"


def test_without_a_plan_the_least_recently_used_goes_first() -> None:
    entries = [entry("a", 3), entry("b", 1), entry("c", 2)]
    assert [e.name for e in eviction_order(entries, lambda name: math.inf)] == ["b", "c", "a"]


def test_a_far_prefetch_does_not_drive_out_what_is_needed_sooner() -> None:
    assert order("abcd", 0, [entry("a"), entry("b"), entry("d")], incoming=2) == "d"


def hits(uses: Sequence[str], capacity: int, lru: bool) -> int:
    """Demand hits of a cache that evicts as ours does."""
    held, count = dict[str, CacheEntry](), 0
    for now, name in enumerate(uses):
        if name in held:
            count += 1
        elif len(held) == capacity:
            first = eviction_order(held.values(), (lambda n: math.inf) if lru else plan_of(uses, now))[0]
            del held[first.name]
        held[name] = entry(name, used=now)
    return count


def optimum(uses: Sequence[str], capacity: int) -> int:
    """The most demand hits any cache can have, by trying all (tiny inputs)."""
    best: dict[frozenset[str], int] = {frozenset(): 0}
    for name in uses:
        after: dict[frozenset[str], int] = {}
        for held, count in best.items():
            if name in held:
                choices = [(held, count + 1)]
            elif len(held) < capacity:
                choices = [(held | {name}, count)]
            else:
                choices = [((held - {out}) | {name}, count) for out in held]
            for state, total in choices:
                after[state] = max(after.get(state, 0), total)
        best = after
    return max(best.values())


@given(st.lists(st.sampled_from("abcdef"), max_size=25), st.integers(1, 4))
def test_with_a_plan_it_hits_as_often_as_any_cache_can(uses: list[str], capacity: int) -> None:
    assert optimum(uses, capacity) == hits(uses, capacity, lru=False)


@pytest.mark.parametrize("capacity", [10, 50, 90])
def test_a_cyclic_scan_defeats_lru_and_not_the_plan(capacity: int) -> None:
    rng = np.random.default_rng(0)
    cyclic = [f"{i}" for _ in range(10) for i in range(100)]
    shuffled = [f"{i}" for _ in range(10) for i in rng.permutation(100)]
    assert hits(cyclic, capacity, lru=True) == 0
    assert hits(cyclic, capacity, lru=False) >= 0.85 * 9 * capacity
    assert hits(shuffled, capacity, lru=False) > 1.15 * hits(shuffled, capacity, lru=True)
