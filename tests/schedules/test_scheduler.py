"""The scheduler itself: what it finds, replays, and leaves behind."""

import threading
from pathlib import Path

import pytest
from scheduler import (
    Deadlock,
    Exhaustive,
    Found,
    Greenlet,
    RealThread,
    explore,
    replay,
)
from scheduler.model import Model

from pipegraph import concurrency


class Counter(Model):
    """Two threads add to a number that no lock guards."""

    def run(self):
        self.number = 0
        self.lock = concurrency.Lock()
        threads = [concurrency.Thread(target=self.add) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert self.number == 2, self.number

    def add(self):
        with self.lock:
            before = self.number
        with self.lock:
            self.number = before + 1


class Guarded(Counter):
    def add(self):
        with self.lock:
            self.number += 1


class Unguarded(Counter):
    """Nothing here is a switch point, but for the lines."""

    def add(self):
        for _ in range(1):
            before = self.number
            self.number = before + 1


class OppositeLocks(Model):
    """Two threads take two locks in opposite orders."""

    def run(self):
        first, second = concurrency.Lock(), concurrency.Lock()

        def take(one, other):
            with one, other:
                pass

        thread = concurrency.Thread(target=take, args=(second, first), name="other")
        thread.start()
        take(first, second)
        thread.join()


class Waits(Model):
    """An hour's wait takes no time, and ends exactly then."""

    def run(self):
        condition = concurrency.Condition()
        begun = concurrency.monotonic()
        with condition:
            assert not condition.wait(3600.0)
        assert 3600 <= concurrency.monotonic() - begun < 3601


class Interrupted(Model):
    """Ctrl-C ends a wait for a lock, and the lock is not held afterwards."""

    def run(self):
        lock = concurrency.Lock()
        lock.acquire()
        self.interrupt_in(0)
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
        lock.release()
        assert lock.acquire(blocking=False)


@pytest.mark.parametrize("strategies", [None, Exhaustive(2)], ids=["drawn", "exhaustive"])
def test_a_lost_update_is_found_and_replayed(strategies):
    with pytest.raises(Found) as found:
        explore(Counter, schedules=500, strategies=strategies)
    assert "assert 1 == 2" in str(found.value.__cause__)
    schedule = str(found.value).rsplit("--schedule=", 1)[1]
    for _ in range(3):
        with pytest.raises(AssertionError, match="assert 1 == 2"):
            replay(Counter, schedule)


def test_all_schedules_with_two_preemptions_of_a_right_model_are_run_and_end():
    report = explore(Guarded, strategies=Exhaustive(2))
    assert report.schedules == report.distinct > 50


def test_a_deadlock_names_every_thread_with_its_stack():
    with pytest.raises(Found) as found:
        explore(OppositeLocks, schedules=200)
    deadlock = found.value.__cause__
    assert isinstance(deadlock, Deadlock)
    assert "<0 main>: waits for <held lock>" in str(deadlock)
    assert "<1 other>: waits for <held lock>" in str(deadlock)
    assert "with one, other" in str(deadlock)


def test_every_line_can_be_a_switch_point():
    explore(Unguarded, schedules=300)
    with pytest.raises(Found, match="Unguarded fails"):
        explore(Unguarded, schedules=300, lines=(Path(__file__).name,))
    explore(Unguarded, schedules=300)


@pytest.mark.parametrize("model", [Waits, Interrupted])
def test_time_and_interrupts_are_the_schedulers(model):
    explore(model, schedules=20)


@pytest.mark.parametrize("vehicle", [Greenlet, RealThread])
def test_a_schedule_that_fails_is_unwound_in_any_vehicle(vehicle, monkeypatch):
    monkeypatch.setattr(OppositeLocks, "vehicle", vehicle)
    before = set(threading.enumerate())
    with pytest.raises(Found, match="OppositeLocks fails"):
        explore(OppositeLocks, schedules=200)
    assert set(threading.enumerate()) == before
