"""What ``pipegraph.concurrency`` offers, made of the scheduler's switch points.

Made in a schedule, an object belongs to it. Used by a thread that the schedule does not hold (the garbage collector of
a later test, say), it never blocks.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from queue import Empty
from typing import Any

from scheduler.kernel import Scheduler, Task

_active: Scheduler | None = None


def activate(scheduler: Scheduler | None) -> None:
    """The scheduler to which objects made from now on belong."""
    global _active
    _active = scheduler


def active() -> Scheduler | None:
    """That scheduler."""
    return _active


def _scheduler() -> Scheduler:
    assert _active is not None
    return _active


class Lock:
    """``threading.Lock``."""

    def __init__(self) -> None:
        self._scheduler: Scheduler = _active  # type: ignore[assignment]
        self._held = False
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        scheduler.steps = step = scheduler.steps + 1  # a switch point, without the call: half of all are here
        if step >= scheduler.look_at:
            scheduler.look()
        if self._held:
            return self._wait(blocking, timeout)
        self._held = True
        return True

    __enter__ = acquire

    def _wait(self, blocking: bool, timeout: float) -> bool:
        scheduler = self._scheduler
        while self._held:
            if not blocking:
                return False
            task = scheduler.require()
            self._waiting.append(task)
            try:
                in_time = scheduler.block(self, None if timeout < 0 else timeout)
            finally:
                if task in self._waiting:
                    self._waiting.remove(task)
            if not in_time and self._held:
                return False
        self._held = True
        return True

    def release(self, *error: object) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False
        scheduler = self._scheduler
        if self._waiting:
            for task in self._waiting:
                scheduler.wake(task)
            self._waiting.clear()
        scheduler.steps = step = scheduler.steps + 1
        if step >= scheduler.look_at and scheduler.failure is None:
            scheduler.look()

    __exit__ = release

    def locked(self) -> bool:
        return self._held

    def _at_fork_reinit(self) -> None:
        self._held = False

    def __repr__(self) -> str:
        return f"<{'held' if self._held else 'free'} lock>"


class RLock(Lock):
    """``threading.RLock``."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: Task | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._count and self._owner is self._scheduler.current:
            self._count += 1
            return True
        if not Lock.acquire(self, blocking, timeout):
            return False
        self._owner, self._count = self._scheduler.current, 1
        return True

    __enter__ = acquire

    def release(self, *error: object) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            Lock.release(self)

    __exit__ = release

    def _is_owned(self) -> bool:
        return self._count > 0 and self._owner is self._scheduler.current

    def _release_save(self) -> int:
        count, self._count, self._owner = self._count, 0, None
        Lock.release(self)
        return count

    def _acquire_restore(self, count: int) -> None:
        Lock.acquire(self)
        self._owner, self._count = self._scheduler.current, count

    def _at_fork_reinit(self) -> None:
        self._held, self._owner, self._count = False, None, 0

    def __repr__(self) -> str:
        return f"<R{super().__repr__()[1:-1]} {self._count}>"


class Condition:
    """``threading.Condition``; a notified thread competes for the lock like any other."""

    def __init__(self, lock: Any = None) -> None:
        self._scheduler = _scheduler()
        self._lock = RLock() if lock is None else lock
        self.acquire = self._lock.acquire
        self.release = self._lock.release
        self._waiting: deque[Task] = deque()

    def __enter__(self) -> Any:
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__()

    def _is_owned(self) -> bool:
        if isinstance(self._lock, RLock):
            return self._lock._is_owned()
        return bool(self._lock.locked())

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_owned():
            raise RuntimeError("cannot wait on un-acquired lock")
        scheduler = self._scheduler
        task = scheduler.require()
        self._waiting.append(task)
        task.guarded += 1  # no fault between the release and the wait: the waiter is queued, as in CPython's
        try:
            saved = self._lock._release_save() if isinstance(self._lock, RLock) else self._lock.release()
        finally:
            task.guarded -= 1
        try:
            if task in self._waiting:
                return scheduler.block(self, timeout)
            return True  # notified while the lock was being released
        finally:
            if task in self._waiting:
                self._waiting.remove(task)
            if scheduler.failure is None:
                task.guarded += 1
                try:
                    if isinstance(self._lock, RLock):
                        self._lock._acquire_restore(saved)
                    else:
                        self._lock.acquire()
                finally:
                    task.guarded -= 1
            else:
                self._take_by_force(saved)

    def _take_by_force(self, saved: Any) -> None:
        """The schedule has failed: whoever unwinds must be able to release."""
        if isinstance(self._lock, RLock):
            self._lock._owner, self._lock._count = self._scheduler.current, saved
        self._lock._held = True

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        scheduler = self._scheduler
        deadline = None if timeout is None else scheduler.now_s + timeout
        result = predicate()
        while not result:
            left = None
            if deadline is not None:
                left = deadline - scheduler.now_s
                if left <= 0:
                    break
            self.wait(left)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot notify on un-acquired lock")
        for _ in range(min(n, len(self._waiting))):
            self._scheduler.wake(self._waiting.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiting))

    def __repr__(self) -> str:
        return f"<condition on {self._lock!r}>"


class Event:
    """``threading.Event``."""

    def __init__(self) -> None:
        self._scheduler = _scheduler()
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        self._scheduler.point()
        return self._set

    def set(self) -> None:
        self._set = True
        for task in self._waiting:
            self._scheduler.wake(task)
        self._waiting.clear()
        self._scheduler.point()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        scheduler.point()
        task = scheduler.require()
        while not self._set:
            self._waiting.append(task)
            try:
                if not scheduler.block(self, timeout):
                    break
            finally:
                if task in self._waiting:
                    self._waiting.remove(task)
        return self._set


class SimpleQueue:
    """``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._scheduler = _scheduler()
        self._items: deque[Any] = deque()
        self._waiting: list[Task] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        for task in self._waiting:
            self._scheduler.wake(task)
        self._waiting.clear()
        if self._scheduler.failure is None:
            self._scheduler.point()

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        scheduler = self._scheduler
        scheduler.point()
        while not self._items:
            if not block:
                raise Empty
            task = scheduler.require()
            self._waiting.append(task)
            try:
                if not scheduler.block(self, timeout) and not self._items:
                    raise Empty
            finally:
                if task in self._waiting:
                    self._waiting.remove(task)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Future(concurrent.futures.Future):
    """``concurrent.futures.Future`` over a controlled condition."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()


def wait(
    futures: Iterable[Any], timeout: float | None = None, return_when: str = concurrent.futures.ALL_COMPLETED
) -> Any:
    """``concurrent.futures.wait``."""
    futures = list(futures)
    first = return_when == concurrent.futures.FIRST_COMPLETED
    changed = Event()
    for future in futures:
        future.add_done_callback(lambda _: changed.set())
    while True:
        done = {future for future in futures if future.done()}
        if (done and first) or len(done) == len(futures):
            break
        changed.clear()
        if len({future for future in futures if future.done()}) == len(done) and not changed.wait(timeout):
            break
    done = {future for future in futures if future.done()}
    return concurrent.futures._base.DoneAndNotDoneFutures(done, set(futures) - done)


class Thread:
    """``threading.Thread``: a task from its start on."""

    native_id = 0

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self._scheduler = _scheduler()
        self._task: Task | None = None
        self._run = functools.partial(target, *args, **kwargs or {}) if target is not None else lambda: None
        self.name = name or f"thread of {getattr(target, '__name__', target)}"
        self.daemon = True

    def start(self) -> None:
        scheduler = self._scheduler
        scheduler.point()
        assert self._task is None, "threads can only be started once"
        self._task = scheduler.begin(self.name, self, self._run)
        scheduler.point()

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.number

    def is_alive(self) -> bool:
        self._scheduler.point()
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        task, scheduler = self._task, self._scheduler
        assert task is not None, "cannot join thread before it is started"
        scheduler.point()
        while not task.done:
            me = scheduler.require()
            task.joiners.append(me)
            try:
                if not scheduler.block(("end of", task), timeout):
                    break
            finally:
                if me in task.joiners:
                    task.joiners.remove(me)

    def __repr__(self) -> str:
        return f"<thread {self.name}>"


def current_thread() -> Any:
    """``threading.current_thread``; of the first task it is the thread that explores."""
    task = _scheduler().current
    return threading.current_thread() if task is None or task.thread is None else task.thread


def get_ident() -> int:
    """``threading.get_ident``."""
    task = _scheduler().current
    return threading.get_ident() if task is None or task.thread is None else task.number


def get_native_id() -> int:
    """0: the system knows nothing of a task."""
    return 0


class local:
    """``threading.local``."""

    def __getattr__(self, name: str) -> Any:
        task = _scheduler().require()
        if self in task.locals and name in task.locals[self]:
            return task.locals[self][name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        _scheduler().require().locals.setdefault(self, {})[name] = value


def start_new_thread(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> int:
    """``_thread.start_new_thread``."""
    thread = Thread(target=function, args=args, kwargs=kwargs or {}, name=f"new {function.__name__}")
    thread.start()
    return thread.ident or 0


TICK_S = 1e-6
"""Virtual seconds that each look at the clock takes."""


def monotonic() -> float:
    """The virtual clock, in seconds."""
    scheduler = _scheduler()
    scheduler.now_s = now = scheduler.now_s + TICK_S
    return now


def monotonic_ns() -> int:
    """The virtual clock, in nanoseconds."""
    scheduler = _scheduler()
    scheduler.now_s = now = scheduler.now_s + TICK_S
    return int(now * 1e9)


class _VirtualTime:
    """In place of the module ``time``, for modules that import it whole."""

    pthread_getcpuclockid = staticmethod(lambda ident: ident)
    clock_gettime_ns = staticmethod(lambda clock: monotonic_ns())
    monotonic = perf_counter = staticmethod(monotonic)
    monotonic_ns = perf_counter_ns = staticmethod(monotonic_ns)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


virtual_time = _VirtualTime()
