"""Sketches of durations: accurate, mergeable, and counted by one thread while others read."""

import pytest
from hypothesis import given, strategies as st

from pipegraph.durations import Durations, Stopwatch


@given(
    st.lists(st.integers(1, 10**13), min_size=1, max_size=300), st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])
)
def test_a_percentile_is_within_one_percent_of_the_exact_one(durations, quantile):
    sketch = Durations()
    sketch.add_all(durations)
    exact = sorted(durations)[int(quantile * (len(durations) - 1))] / 1e9
    assert sketch.quantile_s(quantile) == pytest.approx(exact, rel=0.011)


@given(st.lists(st.lists(st.integers(1, 10**12), max_size=50), min_size=1, max_size=5))
def test_merging_parts_equals_counting_all_in_one(parts):
    merged, whole = Durations(), Durations()
    for part in parts:
        one = Durations()
        one.add_all(part)
        merged.merge(one)
        whole.add_all(part)
    assert [merged.quantile_s(q / 100) for q in range(101)] == [whole.quantile_s(q / 100) for q in range(101)]
    assert merged.count == sum(map(len, parts))


def test_since_gives_what_came_after_an_earlier_copy():
    watch = Stopwatch()
    for ns in (1_000, 2_000):
        watch.noted.append(ns)
    earlier = watch.durations()
    watch.noted.append(5_000_000)
    interval = watch.durations().since(earlier)
    assert interval.count == 1
    assert interval.quantile_s(0.5) == pytest.approx(0.005, rel=0.011)
