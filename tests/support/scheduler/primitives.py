"""The locks, events and queues of ``pipegraph.concurrency``, made of the scheduler's switch points.

Made in a schedule, an object belongs to it. Used by a thread that the schedule does not hold (the garbage collector of
a later test, say), it never blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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


def in_charge() -> Scheduler:
    """That scheduler, inside of a schedule."""
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
        self._scheduler = in_charge()
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
        self._scheduler = in_charge()
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
        self._scheduler = in_charge()
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
