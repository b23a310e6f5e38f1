"""The scheduler itself: what it finds, replays, and leaves behind."""

import ast
import contextlib
import sys
import threading
from pathlib import Path

import pytest
import torch
from schedule_models import ThreeStages
from scheduler import (
    Deadlock,
    Exhaustive,
    Found,
    Greenlet,
    Pct,
    Random,
    RealThread,
    Replay,
    Scheduler,
    explore,
    replay,
    run_once,
)
from scheduler.lines import POINT, with_points
from scheduler.model import Model

from pipegraph import concurrency, global_generators


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


def test_switch_points_at_lines_change_no_result():
    source = """
def result():
    "Docstring."
    total, found = 0, []
    with closing(found):
        for number in range(5):
            if number == 1:
                continue
            elif number == 4:
                break
            else:
                found += [(lambda x: x + total)(number)]
        while (total := total + 1) < 4:
            try:
                found.append({key: key for key in "ab"}[total])
            except KeyError as error:
                match error.args:
                    case (value,):
                        found.append(value)
            finally:
                found.append([each for each in range(total) if each])
    return found, sum(each for each in range(total)), 1 if total else 2
"""
    lines, results = [], []
    for tree in (ast.parse(source), with_points(ast.parse(source))):
        names = {POINT: lambda: lines.append(sys._getframe(1).f_lineno), "closing": contextlib.nullcontext}
        exec(compile(tree, "source", "exec"), names)
        results.append(names["result"]())
    assert results[0] == results[1]
    assert set(lines) >= {3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 17, 19, 21, 22}


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


@pytest.mark.parametrize("strategy", [lambda: Random(7, 0.3), lambda: Pct(7, 3, 900)], ids=["random", "pct"])
def test_one_seed_gives_one_schedule_of_a_loader_in_any_vehicle(strategy):
    ThreeStages.prepare()

    def choices(strategy, vehicle):
        scheduler = Scheduler(strategy, vehicle=vehicle)
        run_once(ThreeStages, scheduler, seed=11)
        return scheduler.choices

    first = choices(strategy(), Greenlet)
    assert len(first) > 50
    for vehicle in (Greenlet, RealThread):
        assert choices(strategy(), vehicle) == first
        assert choices(Replay(first), vehicle) == first


class Identities(Model):
    """Each task has its own thread, identity and thread-locals."""

    def run(self):
        self.local = concurrency.local()
        self.known = {}
        threads = [concurrency.Thread(target=self.know, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        self.know(3)
        for thread in threads:
            thread.join()
            assert self.known[thread] == thread.ident
        assert self.known[threading.current_thread()] == threading.get_ident()
        assert len(set(self.known.values())) == 4

    def know(self, number):
        assert getattr(self.local, "number", None) is None
        self.local.number = number
        with concurrency.Lock():
            self.known[concurrency.current_thread()] = concurrency.get_ident()
        assert self.local.number == number


@pytest.mark.parametrize("vehicle", [Greenlet, RealThread])
def test_a_task_has_its_own_identity_and_thread_locals(vehicle, monkeypatch):
    monkeypatch.setattr(Identities, "vehicle", vehicle)
    explore(Identities, schedules=30)


def test_a_schedule_leaves_the_generators_of_its_thread_as_they_were():
    ThreeStages.prepare()
    explore(ThreeStages, schedules=3)
    assert not torch._C._dispatch_tls_is_dispatch_key_included(global_generators._key)
