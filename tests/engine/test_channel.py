"""The bounded queue between two stages."""

import ctypes
import threading

import pytest
from channel_states import wait_until

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, EndOfEpoch, Failure
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.channel import Channel

pytestmark = pytest.mark.usefixtures("no_leaks")


def chunk(number=0, nbytes=0, epoch=0):
    made = Chunk(number, (("s", number),), epoch, number, number + 1)
    made.nbytes = nbytes
    return made


def putter_waits(channel):
    """Until a putter waits; fails, and does not hang, if it was let in where there is no room."""
    wait_until(channel, lambda s: s.putters_waiting == 1 or s.depth > s.capacity)
    assert channel.stats().depth <= channel.stats().capacity


class Started:
    """A thread whose outcome is asked for."""

    def __init__(self, function, *args):
        self.outcome = None
        self.thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self.thread.start()

    def _run(self, function, args):
        try:
            self.outcome = function(*args)
        except BaseException as error:
            self.outcome = error

    def result(self):
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.outcome


def test_put_waits_while_full_and_resumes_after_one_get():
    channel = Channel(1)
    channel.put(chunk(1))
    writer = Started(channel.put, chunk(2))
    putter_waits(channel)
    assert channel.get().data == 1
    assert writer.result() is True
    assert channel.get().data == 2


def test_what_is_put_with_more_wakes_nobody_until_the_last_of_it():
    channel = Channel(8)
    reader = Started(channel.get)
    wait_until(channel, lambda s: s.getters_waiting == 1)
    channel.put(chunk(1), more=True)
    channel.put(chunk(2), more=True)
    assert (channel.stats().getters_waiting, channel.stats().depth) == (1, 2)
    channel.put(chunk(3))
    assert reader.result().data == 1
    assert [channel.get().data for _ in range(2)] == [2, 3]


def test_get_waits_while_empty():
    channel = Channel(4)
    reader = Started(channel.get)
    wait_until(channel, lambda s: s.getters_waiting == 1)
    channel.put(chunk(7))
    assert reader.result().data == 7


def test_the_rest_of_a_bundle_wakes_the_next_getter():
    """On the channel itself: a graph would still come to its end, with workers that idle."""
    channel = Channel(8, bundle_rows=8)
    readers = [Started(channel.take, 2) for _ in range(2)]
    wait_until(channel, lambda s: s.getters_waiting == 2)
    channel.put(Bundle.of([chunk(number) for number in range(4)]))
    assert sorted(reader.result()[1].data for reader in readers) == [[0, 1], [2, 3]]


def test_bytes_bound_the_queue_but_an_empty_one_takes_an_item_of_any_size():
    channel = Channel(10, max_bytes=100)
    assert channel.put(chunk(0, 500))
    writer = Started(channel.put, chunk(1, 1))
    putter_waits(channel)
    assert channel.stats().nbytes == 500
    channel.get()
    assert writer.result() is True
    assert channel.stats().nbytes == 1


def test_numbers_leave_in_order_whatever_the_order_of_arrival():
    channel = Channel(8, sequenced=True)
    for seq in (2, 1, 3, 0):
        channel.put_at(seq, chunk(seq))
    assert [channel.get().data for _ in range(4)] == [0, 1, 2, 3]


def test_a_later_number_leaves_room_for_the_one_that_is_next():
    channel = Channel(2, sequenced=True)
    channel.put_at(1, chunk(1))
    later = Started(channel.put_at, 2, chunk(2))
    putter_waits(channel)
    assert channel.put_at(0, chunk(0))  # never locked out
    assert channel.stats().depth == 2
    assert [channel.get().data for _ in range(3)] == [0, 1, 2]
    assert later.result() is True


def test_depth_never_exceeds_capacity_with_many_numbers():
    capacity, count = 3, 200
    channel, deepest = Channel(capacity, sequenced=True), 0
    tickets, lock = iter(range(count)), threading.Lock()

    def work():
        while True:
            with lock:
                seq = next(tickets, None)
            if seq is None:
                return
            channel.put_at(seq, chunk(seq))

    workers = [Started(work) for _ in range(4)]
    for expected in range(count):
        deepest = max(deepest, channel.stats().depth)
        assert channel.get().data == expected
    for worker in workers:
        assert worker.result() is None
    assert 1 <= deepest <= capacity


@pytest.mark.parametrize("call", ["get", "put", "take", "turn"])
def test_cancel_wakes_every_waiter(call):
    channel = Channel(1, sequenced=call == "turn")
    if call == "put":
        channel.put(chunk())
        waiter = Started(channel.put, chunk())
    else:
        waiter = Started(
            *{"get": (channel.get,), "take": (channel.take,), "turn": (channel.wait_turn, 5)}[call]
        )
    wait_until(channel, lambda s: s.putters_waiting + s.getters_waiting == 1 or s.depth > s.capacity)
    assert channel.stats().depth <= 1
    channel.cancel()
    assert isinstance(waiter.result(), Cancelled)
    with pytest.raises(Cancelled):
        channel.get()
    with pytest.raises(Cancelled):
        channel.put(chunk())


def test_grow_makes_room_for_exactly_the_item_that_waits():
    channel = Channel(1)
    channel.put(chunk(0))
    writer = Started(channel.put, chunk(1))
    putter_waits(channel)
    assert channel.full()
    assert channel.grow() == 2
    assert writer.result() is True
    assert not channel.full()


def test_discard_drops_what_is_held_refuses_what_comes_and_ends_with_the_epoch():
    channel = Channel(3)
    channel.put(chunk(0, epoch=4))
    assert [c.data for c in channel.discard(4)] == [0]
    assert channel.put(chunk(1, epoch=4)) is False
    assert channel.put(Failure(ValueError(), 4)) is False
    assert channel.discards(4)
    assert not channel.discards(5)
    channel.put(EndOfEpoch(4))
    assert channel.put(chunk(2, epoch=5)) is True
    assert isinstance(channel.get(), EndOfEpoch)
    assert channel.get().data == 2


def test_take_hands_out_tickets_in_the_order_of_items():
    channel = Channel(10)
    for i in range(5):
        channel.put(chunk(i))
    assert [(t, c.data) for t, c in (channel.take() for _ in range(5))] == [(i, i) for i in range(5)]


def interrupt(thread):
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
    )


def test_an_interrupted_wait_leaves_the_queue_of_waiters_and_takes_no_wake_with_it():
    channel = Channel(1)
    interrupted = Started(channel.get)
    wait_until(channel, lambda s: s.getters_waiting == 1)
    interrupt(interrupted.thread)  # it is delivered when the lock is released to it
    other = Started(channel.get)
    wait_until(channel, lambda s: s.getters_waiting == 2)
    channel.put(chunk(1))  # wakes the interrupted one, which must pass the wake on
    assert isinstance(interrupted.result(), KeyboardInterrupt)
    assert other.result().data == 1
