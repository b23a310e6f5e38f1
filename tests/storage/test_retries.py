"""Decisions of the store client, with time passed in."""

import pytest

from pipegraph.storage.retries import Backoff


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
