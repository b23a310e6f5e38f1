"""The preloading policy: when the next part is started, and how many."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from pipegraph.reader.prefetch_policy import Preload, RecentDurations, preload

GB = 10**9


def decide(**changes):
    facts = {
        "remaining_s": 1_000.0,
        "train_s": 1_000.0,
        "lead_s": 110.0,
        "ahead": 0,
        "upcoming": [GB] * 10,
        "free_bytes": 100 * GB,
    }
    return preload(**(facts | changes))


def test_the_next_part_is_started_as_long_before_it_is_needed_as_its_lead():
    assert decide() == Preload(0, pytest.approx(890))
    assert decide(remaining_s=110.1) == Preload(0, pytest.approx(0.1))
    assert decide(remaining_s=110).start == 1


def test_after_it_the_one_behind_is_due_a_part_later():
    assert decide(remaining_s=100, ahead=1) == Preload(0, pytest.approx(990))


@given(load_s=st.integers(50, 9_000), remaining_s=st.integers(0, 1_000))
def test_loading_slower_than_training_keeps_their_ratio_of_parts_on_their_way(load_s, remaining_s):
    decision = decide(remaining_s=remaining_s, lead_s=load_s)
    assert decision.start == max(0, (load_s - remaining_s) // 1_000 + 1)
    if remaining_s:
        assert decision.start <= math.ceil(load_s / 1_000)


def test_with_little_measured_yet_it_loads_one_part_ahead_at_once():
    assert decide(train_s=None) == Preload(1, None)
    assert decide(lead_s=None) == Preload(1, None)
    assert decide(lead_s=None, ahead=1) == Preload(0, None)


def test_free_bytes_bound_how_many_are_started():
    slow = {"lead_s": 5_000.0, "upcoming": [2 * GB, 3 * GB, 4 * GB]}
    assert decide(**slow, free_bytes=9 * GB).start == 3
    assert decide(**slow, free_bytes=9 * GB - 1) == Preload(2, None)
    assert decide(**slow, free_bytes=2 * GB - 1) == Preload(0, None)
    assert decide(**slow, free_bytes=0).start == 0


def test_no_part_is_left_at_the_end():
    assert decide(upcoming=[], remaining_s=0) == Preload(0, None)


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
