"""Decisions of the store client, with time passed in."""

import pytest

from pipegraph.storage.retries import Backoff, Hedge


def test_delays_double_up_to_a_bound_and_are_drawn_from_zero_on() -> None:
    retry = Backoff(first_s=0.1, max_s=1.0)
    assert [retry.delay(n, 0, 0, 0.5) for n in range(1, 7)] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.5, 0.5])
    assert retry.delay(5, 0, 0, 0.0) == 0.0
    assert retry.delay(10_000, 0, 0, 1.0) == 1.0


def test_no_try_begins_after_the_deadline() -> None:
    retry = Backoff(deadline_s=10, first_s=1, max_s=1)
    assert retry.delay(1, 9.4, 0, 0.5) == 0.5
    assert retry.delay(1, 9.6, 0, 0.5) is None


def test_a_long_transfer_has_the_time_its_bytes_need() -> None:
    retry = Backoff(deadline_s=10, min_rate=1000)
    assert retry.delay(1, 100, 0, 0) is None
    assert retry.delay(1, 100, 100_000, 0) == 0


def test_nothing_is_asked_twice_before_the_usual_time_is_known() -> None:
    hedge = Hedge()
    for _ in range(Hedge.NEEDED - 1):
        hedge.finished(1.0)
    assert hedge.after() is None
    hedge.finished(1.0)
    assert hedge.after() == 1.0


def test_the_second_request_comes_after_the_95th_percentile() -> None:
    hedge = Hedge()
    for n in range(100):
        hedge.finished(n / 100)
    assert hedge.after() == 0.95


def test_at_most_one_in_twenty_is_asked_twice() -> None:
    hedge, hedged = Hedge(), 0
    for _ in range(1000):
        if hedge.after() is not None:
            hedged += hedge.take()
        hedge.finished(1.0)
    assert 40 <= hedged <= 51


def test_of_requests_that_are_all_late_at_once_no_more_are_asked_twice() -> None:
    hedge = Hedge()
    for _ in range(100):
        hedge.finished(1.0)
    waiting = [hedge.after() for _ in range(90)]
    assert waiting == [1.0] * 90
    assert sum(hedge.take() for _ in waiting) == 6


def test_very_short_times_do_not_make_hedges() -> None:
    hedge = Hedge(min_s=0.05)
    for _ in range(50):
        hedge.finished(0.001)
    assert hedge.after() == 0.05
