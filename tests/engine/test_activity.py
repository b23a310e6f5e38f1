"""Who runs and who waits."""

import threading
from time import perf_counter_ns

from pipegraph.engine.activity import Activity, Waiter
from pipegraph.engine.meter import Meter


def test_idle_is_told_once_when_the_last_running_thread_waits():
    activity, told = Activity(), []
    activity.on_idle = lambda: told.append(threading.current_thread().name)
    activity.attach(2)
    activity.pause()
    assert told == []
    activity.pause()
    assert told == [threading.current_thread().name]


def test_a_wake_counts_before_the_woken_thread_runs():
    activity, told = Activity(), []
    activity.on_idle = lambda: told.append("idle")
    activity.attach(2)
    waiter = Waiter(0)
    activity.pause()  # that waiter's thread
    waiter.wake(activity)
    activity.pause()  # the waker goes to wait: the woken one still runs
    assert told == []
    activity.pause()
    assert told == ["idle"]


def test_a_wait_returns_at_once_after_an_early_wake():
    activity = Activity()
    activity.attach()
    waiter = Waiter(0)
    waiter.wake(activity)
    waiter.wait(activity)


def test_a_worker_counts_how_often_it_was_woken_and_how_late_it_continued():
    activity, meter, idle = Activity(), Meter(), threading.Event()
    activity.on_idle = idle.set
    waiter = Waiter(perf_counter_ns())

    def work():
        meter.thread_begins()
        waiter.wait(activity)
        meter.thread_ends()

    activity.attach()
    worker = threading.Thread(target=work)
    worker.start()
    assert idle.wait(60)
    assert meter.wakes == 0
    waiter.wake(activity)
    worker.join(60)
    assert meter.wakes == 1 and meter.late_ns > 0
