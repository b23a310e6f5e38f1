"""The threads of ``pipegraph.concurrency``, what knows the calling one, and the virtual clock."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from scheduler.kernel import Task
from scheduler.primitives import in_charge


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
        self._scheduler = in_charge()
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
    task = in_charge().current
    return threading.current_thread() if task is None or task.thread is None else task.thread


def get_ident() -> int:
    """``threading.get_ident``."""
    task = in_charge().current
    return threading.get_ident() if task is None or task.thread is None else task.number


def get_native_id() -> int:
    """0: the system knows nothing of a task."""
    return 0


class local:
    """``threading.local``."""

    def __getattr__(self, name: str) -> Any:
        task = in_charge().require()
        if self in task.locals and name in task.locals[self]:
            return task.locals[self][name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        in_charge().require().locals.setdefault(self, {})[name] = value


def start_new_thread(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> int:
    """``_thread.start_new_thread``."""
    thread = Thread(target=function, args=args, kwargs=kwargs or {}, name=f"new {function.__name__}")
    thread.start()
    return thread.ident or 0


TICK_S = 1e-6
"""Virtual seconds that each look at the clock takes."""


def monotonic() -> float:
    """The virtual clock, in seconds."""
    scheduler = in_charge()
    scheduler.now_s = now = scheduler.now_s + TICK_S
    return now


def monotonic_ns() -> int:
    """The virtual clock, in nanoseconds."""
    scheduler = in_charge()
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
