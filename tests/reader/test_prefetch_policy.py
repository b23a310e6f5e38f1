"""The preloading policy: when the next part is started, and how many."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from pipegraph.reader.prefetch_policy import RecentDurations, start_in

GB = 10**9


def decide(until_s=1_000.0, lead_s=110.0, ahead=0, nbytes=GB, free_bytes=100 * GB):
    return start_in(until_s, lead_s, ahead, nbytes, free_bytes)


def started(load_s, remaining_s=1_000, train_s=1_000, sizes=(GB,) * 10, free_bytes=100 * GB):
    """Of the parts behind the one in use, those that are started now."""
    count = 0
    for nbytes in sizes:
        if decide(remaining_s + count * train_s, load_s, count, nbytes, free_bytes) != 0:
            break
        count, free_bytes = count + 1, free_bytes - nbytes
    return count


def test_the_next_part_is_started_as_long_before_it_is_needed_as_its_lead():
    assert decide() == pytest.approx(890)
    assert decide(until_s=110.1) == pytest.approx(0.1)
    assert decide(until_s=110) == 0


@given(load_s=st.integers(50, 9_000), remaining_s=st.integers(0, 1_000))
def test_loading_slower_than_training_keeps_their_ratio_of_parts_on_their_way(load_s, remaining_s):
    count = started(load_s, remaining_s)
    assert count == max(0, (load_s - remaining_s) // 1_000 + 1)
    if remaining_s:
        assert count <= math.ceil(load_s / 1_000)


def test_with_little_measured_yet_it_loads_one_part_ahead_at_once():
    assert decide(until_s=None) == 0
    assert decide(lead_s=None) == 0
    assert decide(lead_s=None, ahead=1) is None
    assert decide(lead_s=None, free_bytes=GB - 1) is None


def test_free_bytes_bound_how_many_are_started():
    slow = {"load_s": 5_000, "sizes": (2 * GB, 3 * GB, 4 * GB)}
    assert started(**slow, free_bytes=9 * GB) == 3
    assert started(**slow, free_bytes=9 * GB - 1) == 2
    assert started(**slow, free_bytes=2 * GB - 1) == 0
    assert decide(until_s=0, free_bytes=0) is None


def test_the_trimmed_mean_leaves_out_the_longest_of_twenty():
    durations = RecentDurations()
    assert durations.trimmed_mean is None
    for _ in range(39):
        durations.add(1.0)
    durations.add(600.0)
    assert durations.trimmed_mean == 1.0
    for _ in range(64):
        durations.add(3.0)
    assert durations.trimmed_mean == 3.0


def test_durations_give_the_mean_and_the_percentile_of_the_latest():
    durations = RecentDurations(20)
    assert (durations.mean, durations.p95) == (None, None)
    for seconds in range(100, 0, -5):
        durations.add(seconds)
    assert durations.mean == pytest.approx(52.5)
    assert durations.p95 == 95
    durations.add(7.0)
    assert durations.p95 == 90
    few = RecentDurations()
    few.add(3.0)
    few.add(9.0)
    assert few.p95 == 9.0


def test_the_lead_is_the_percentile_and_a_margin_that_grows_with_the_spread():
    steady, varied = RecentDurations(), RecentDurations()
    for seconds in range(7):
        steady.add(10.0)
        varied.add(7.0 + seconds)
    assert steady.lead is None  # seven measurements say little
    steady.add(10.0)
    varied.add(10.0)
    assert steady.lead == pytest.approx(11)
    assert varied.lead == pytest.approx(13 * 1.1 + 3 * (13 - 10))


def test_one_load_far_above_the_rest_does_not_shorten_the_lead():
    durations = RecentDurations()
    durations.add(1_000.0)
    for _ in range(30):
        durations.add(10.0)
    assert durations.mean > durations.p95 == 10.0
    assert durations.lead == pytest.approx(11)
