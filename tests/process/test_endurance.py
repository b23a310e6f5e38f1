"""What must hold however often it is tried: workers killed, trainers killed, loaders opened and broken off."""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing.resource_tracker
import os
import random
import select
import signal
import threading
import time

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

import pipegraph as pg
from pipegraph import operators as ops
from tests.process.process_pipelines import hosts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_leaks")]

PARENTS = 100
IN_FLIGHT = 150
"""Rows that a loader of these has in hand at any time, at most."""
CYCLES = 500
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(autouse=True)
def patience(pytestconfig):
    """These take minutes: pytest would write all stacks after two, as if something hung. After half an hour it does."""
    stderr = pytestconfig.stash[fault_handler_stderr_fd_key]  # not captured: that would be lost
    faulthandler.dump_traceback_later(1800, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module", autouse=True)
def tracker():
    """The process that multiprocessing starts with the first spawn, and which stays."""
    multiprocessing.resource_tracker.ensure_running()


def busy(x):
    until = time.perf_counter() + 0.002
    while time.perf_counter() < until:
        pass
    return x


def pipeline(fn=busy, items=2000, workers=2, batch=None):
    graph = pg.Graph("g", seed=3)
    rows = graph.add(ops.FromSequence(range(items)))
    tail = rows.then(fn, name="work", workers=workers, backend="process")
    if batch:
        tail.then(ops.Batch(batch, collate=list))
    return graph


@pytest.mark.parametrize("batch", [None, 32], ids=["rows alone", "rows in bundles"])
def test_a_random_worker_killed_every_200_ms_costs_no_sample(batch):
    draw, over, kills, found = random.Random(7), threading.Event(), [], []

    def kill_now_and_then(hosts):
        spared = dict.fromkeys(
            hosts, 0
        )  # until so many rows are there: a row that is hit twice is blamed, by design
        while not over.wait(0.2):
            there = len(found) * (batch or 1)
            hit = [host for host in hosts if host.pid and there >= spared[host]]
            if hit:
                host = draw.choice(hit)
                spared[host] = there + IN_FLIGHT
                with contextlib.suppress(ProcessLookupError, TypeError):  # it has ended already
                    os.kill(host.pid, signal.SIGKILL)
                    kills.append(host)

    with pipeline(items=5000, batch=batch).loader() as loader:
        running = iter(loader)
        found.append(next(running))
        killer = threading.Thread(target=kill_now_and_then, args=(hosts(loader),))
        killer.start()
        try:
            for rows in running:
                found.append(rows)
        finally:
            over.set()
            killer.join()
        assert not loader.profile().quarantined
    flat = [x for rows in found for x in rows] if batch else found
    assert flat == list(range(5000))
    assert len(kills) >= 10


def children():
    """Of this process, but for the tracker."""
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        found = set(map(int, file.read().split()))
    return sorted(found - {multiprocessing.resource_tracker._resource_tracker._pid})


def left_in_shm():
    """Without what other programs make there at the same time: named semaphores, and what torch and Python share."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "torch_", "psm_")))


def all_end_within(seconds):
    """Whether every child of this process ends in time, also those that come to it as orphans."""
    deadline = time.monotonic() + seconds
    while found := children():
        for pid in found:
            fd = os.pidfd_open(pid)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            ended = poll.poll(max(0, deadline - time.monotonic()) * 1000)
            os.close(fd)
            if not ended:
                return False
            os.waitpid(pid, 0)
    return True


def train(started):
    """The life of a trainer that is to be killed."""
    try:
        with pipeline(items=100_000, batch=8).loader() as loader:
            for step, _ in enumerate(loader):
                if step == 3:
                    os.write(started, b"x")
    finally:
        os._exit(1)


def test_nothing_outlives_a_trainer_that_is_killed():
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans come to us, so that none escapes
    draw, shm = random.Random(11), left_in_shm()
    try:
        for turn in range(PARENTS):
            started, theirs = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(started)
                train(theirs)
            os.close(theirs)
            poll = select.poll()
            poll.register(started, select.POLLIN)
            # Two in three are killed in the middle of the epoch, the others at any moment of their start.
            assert poll.poll(60_000 if turn % 3 else draw.randrange(1, 400)) or not turn % 3
            poll.poll(0) and os.read(started, 1)
            poll.poll(draw.randrange(1, 50))
            os.kill(pid, signal.SIGKILL)
            assert all_end_within(20), f"try {turn}: {children()} are still there"
            os.close(started)
    finally:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)
    assert left_in_shm() == shm


class Odd(Exception):
    pass


def broken_off(loader):
    for x in loader:
        if x == 5:
            break


def left_by_an_error(loader):
    with pytest.raises(Odd):
        for x in loader:
            if x == 5:
                raise Odd


def left_by_ctrl_c(loader):
    with pytest.raises(KeyboardInterrupt):
        for x in loader:
            if x == 5:
                signal.raise_signal(signal.SIGINT)


def run_to_its_end(loader):
    assert list(loader) == list(range(40))


def forgotten(loader):
    running = iter(loader)
    assert next(running) == 0


def left_to_a_fork(loader):
    running = iter(loader)
    assert next(running) == 0
    child = os.fork()
    if not child:
        code = 1
        try:
            with pipeline(fn=abs, items=20).loader() as own:
                code = int(list(own) != list(range(20)))
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert list(running) == list(range(1, 40))


def child_of_spawn():
    with pipeline(fn=abs, items=20).loader() as loader:
        assert list(loader) == list(range(20))


def left_to_a_spawn(loader):
    running = iter(loader)
    assert next(running) == 0
    child = multiprocessing.get_context("spawn").Process(target=child_of_spawn)
    child.start()
    child.join()
    assert child.exitcode == 0
    child.close()


def state():
    """What must not grow: descriptors, children, threads, mappings of shared segments."""
    with open("/proc/self/maps") as file:
        segments = sum("memfd:pipegraph" in line for line in file)
    return len(os.listdir("/proc/self/fd")), len(children()), threading.active_count(), segments


def test_cycles_leave_nothing_behind():
    ways = [broken_off, left_by_an_error, left_by_ctrl_c, run_to_its_end, forgotten, left_to_a_fork]
    child_of_spawn()
    gc.collect()
    before = state()
    for cycle in range(CYCLES):
        way = left_to_a_spawn if cycle % 100 == 99 else ways[cycle % len(ways)]
        loader = pipeline(fn=abs, items=40).loader()
        way(loader)
        if way is not forgotten:
            loader.close()
        del loader
        if cycle % 20 == 19:
            gc.collect()
            assert state() == before, f"after cycle {cycle} ({way.__name__})"
