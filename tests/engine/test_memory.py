"""The memory account: what is alive, and who waits for room."""

import threading

import pytest

from pipegraph.engine.activity import Activity, Cancelled
from pipegraph.engine.memory import Account
from pipegraph.errors import MemoryLimitError

pytestmark = pytest.mark.usefixtures("no_leaks")


class Waiting:
    """A reservation made in a thread of its own."""

    def __init__(self, account, *args):
        self.account, self.outcome = account, None
        before = len(account.waiting())
        self.thread = threading.Thread(target=self._run, args=args, daemon=True)
        self.queued = threading.Event()
        account.activity.on_idle = self.queued.set
        account.activity.attach()
        self.thread.start()
        assert self.queued.wait(20)
        assert len(account.waiting()) == before + 1

    def _run(self, *args):
        try:
            self.outcome = self.account.reserve(*args)
        except BaseException as error:
            self.outcome = error
        self.account.activity.pause()

    def result(self):
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.outcome


@pytest.fixture
def account():
    return Account(100, Activity())


def test_a_buffer_counts_once_for_as_long_as_anything_refers_to_it(account):
    stage = account.stage("a", 0)
    account.settle(stage, 0, (), ((1, 30),))
    account.hold(((1, 30),), 2)
    assert account.used == 30
    account.release(((1, 30),))
    account.release(((1, 30),))
    assert account.used == 30
    account.release(((1, 30),))
    assert account.used == 0
    assert account.peak == 30


def test_what_a_call_keeps_of_its_input_is_not_counted_twice(account):
    stage = account.stage("a", 0)
    account.settle(stage, 0, (), ((1, 30),))
    account.settle(stage, 0, ((1, 30),), ((1, 30), (2, 5)))
    assert account.used == 35


def test_a_reservation_is_what_the_largest_call_has_added(account):
    stage = account.stage("a", 0)
    assert account.reserve(stage) == 0
    account.settle(stage, 0, (), ((1, 30),))
    assert account.reserve(stage) == 30
    assert account.used == 60
    account.cancel_reservation(30)
    assert account.used == 30


def test_a_stage_leaves_room_for_one_item_of_every_stage_further_down(account):
    up, down = account.stage("up", 1), account.stage("down", 0)
    account.settle(up, 0, (), ((1, 20),))
    account.settle(down, 0, ((1, 20),), ((2, 50),))
    waiting = Waiting(account, up)  # 50 + 20 is less than 100, but down's next item needs 50
    assert account.reserve(down) == 50
    account.cancel_reservation(50)
    account.release(((2, 50),))
    assert waiting.result() == 20


def test_of_two_waiters_the_one_furthest_down_goes_first(account):
    up, down = account.stage("up", 1), account.stage("down", 0)
    account.settle(up, 0, (), ((1, 10),))
    account.settle(down, 0, (), ((2, 60),))
    account.hold(((3, 25),))
    waiting_up = Waiting(account, up)
    waiting_down = Waiting(account, down)
    assert account.waiting() == ["down", "up"]
    account.release(((2, 60),))
    assert waiting_down.result() == 60
    assert account.waiting() == ["up"]
    account.cancel()
    assert isinstance(waiting_up.result(), Cancelled)


def test_the_head_of_the_line_always_finds_the_room_that_later_items_leave(account):
    stage = account.stage("a", 0)
    account.settle(stage, 0, (), ((1, 40),))
    later = Waiting(account, stage, lambda ticket: ticket == 0, 1)  # 40 + 40 + 40 for the head
    assert account.reserve(stage, lambda ticket: ticket == 0, 0) == 40
    account.settle(stage, 40, (), ((2, 40),))
    account.release(((1, 40),))
    account.release(((2, 40),))
    assert later.result() == 40


def test_a_later_item_continues_when_it_has_become_the_head_of_the_line(account):
    stage, head = account.stage("a", 0), [0]
    account.settle(stage, 0, (), ((1, 40),))
    later = Waiting(account, stage, lambda ticket: ticket == head[0], 1)
    head[0] = 1
    account.nudge()
    assert later.result() == 40


def test_stages_whose_items_hold_no_bytes_need_not_reserve(account):
    stage = account.stage("a", 0)
    account.settle(stage, 0, (), ())
    assert not stage.guarded
    account.settle(stage, 0, (), ((1, 8),))
    assert stage.guarded


def test_an_item_larger_than_the_limit_is_an_error_that_says_what_to_do(account):
    stage = account.stage("big", 0)
    with pytest.raises(
        MemoryLimitError, match=r"stage 'big': one item of 101 B is larger than memory_limit=100 B; raise"
    ):
        account.settle(stage, 0, (), ((1, 101),))


def test_when_everything_stands_still_the_reserve_for_others_is_used_up_to_the_limit(account):
    up, down = account.stage("up", 1), account.stage("down", 0)
    account.settle(up, 0, (), ((1, 20),))
    account.settle(down, 0, (), ((2, 50),))
    waiting = Waiting(account, up)
    assert account.admit_one()
    assert waiting.result() == 20
    assert account.used == 90
    again = Waiting(account, up)
    assert not account.admit_one()
    account.cancel()
    assert isinstance(again.result(), Cancelled)


def test_a_stage_that_has_made_nothing_yet_reserves_what_the_one_above_has_made(account):
    up, down = account.stage("up", 1, reserves=True), account.stage("down", 0, reserves=True)
    account.settle(up, 0, (), ((1, 20),))
    assert account.reserve(down) == 20
    assert account.used == 40


def test_what_came_without_a_reservation_ends_with_its_own_buffers_and_no_others(account):
    up, down = account.stage("up", 1, reserves=True), account.stage("down", 0, reserves=True)
    account.settle(up, 0, (), ((1, 20), (2, 20)), 2)
    assert account.excess == 40
    account.exchange(((1, 20), (2, 20)), [((3, 20),), ((4, 20),)])  # counted anew, row by row
    assert account.excess == 40
    account.settle(down, account.reserve(down), (), ((5, 20),))
    account.release(((5, 20),))
    assert account.excess == 40
    account.release(((3, 20),))
    assert account.excess == 20
    account.release(((4, 20),))
    assert (account.excess, account.used) == (0, 0)
