"""The memory account: what is alive."""

import pytest

from pipegraph.engine.memory import Account


@pytest.fixture
def account():
    return Account(100)


def test_a_buffer_counts_once_for_as_long_as_anything_refers_to_it(account):
    account.settle((), ((1, 30),))
    account.hold(((1, 30),), 2)
    assert account.used == 30
    account.release(((1, 30),))
    account.release(((1, 30),))
    assert account.used == 30
    account.release(((1, 30),))
    assert account.used == 0
    assert account.peak == 30


def test_what_a_call_keeps_of_its_input_is_not_counted_twice(account):
    account.settle((), ((1, 30),))
    account.settle(((1, 30),), ((1, 30), (2, 5)))
    assert account.used == 35


def test_rows_that_are_taken_out_of_a_bundle_are_counted_one_by_one(account):
    account.settle((), ((1, 20), (2, 20)))
    account.exchange(((1, 20), (2, 20)), [((3, 20),), ((4, 20),)])
    account.release(((3, 20),))
    assert account.used == 20
