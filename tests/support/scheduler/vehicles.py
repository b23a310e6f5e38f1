"""What carries a task: a greenlet, or a thread where a model cannot do without.

torch's autograd needs threads: a backward that begins while another is suspended in the same thread counts as nested
in it and works on its queue, so the hooks of one replica would run in the greenlet of another.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

import greenlet


class Vehicle(Protocol):
    """The part of a greenlet that the scheduler uses."""

    parent: Any

    def __init__(self, run: Callable[..., None], parent: Any) -> None: ...

    @property
    def gr_frame(self) -> FrameType | None:
        """Where it is suspended; None before it begins and after its end."""
        ...

    def switch(self) -> Any:
        """Run this on; returns when something switches back to the caller. As ``run`` ends, ``parent`` runs on."""
        ...

    @classmethod
    def current(cls) -> Any:
        """The vehicle of the caller."""
        ...

    @classmethod
    def ended(cls, vehicles: Iterable[Any]) -> None:
        """All have ended."""
        ...


class Greenlet(greenlet.greenlet):
    """A greenlet."""

    @classmethod
    def current(cls) -> Any:
        return greenlet.getcurrent()

    @classmethod
    def ended(cls, vehicles: Iterable[Any]) -> None:
        pass


class RealThread:
    """A thread that runs only between a switch to it and its next switch to another."""

    _mine = threading.local()

    def __init__(self, run: Callable[..., None], parent: Any) -> None:
        self.parent = parent
        self._baton = _thread.allocate_lock()
        self._baton.acquire()
        self._thread = threading.Thread(target=self._live, args=(run,), daemon=True)

    def _live(self, run: Callable[..., None]) -> None:
        self._mine.vehicle = self
        run()
        self.parent._go()

    @classmethod
    def current(cls) -> RealThread:
        made = cls(lambda: None, None)
        made._thread = threading.current_thread()
        cls._mine.vehicle = made
        return made

    @property
    def gr_frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread.ident or 0)

    def _go(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._baton.release()

    def switch(self) -> None:
        self._go()
        self._mine.vehicle._baton.acquire()

    @classmethod
    def ended(cls, vehicles: Iterable[RealThread]) -> None:
        for each in vehicles:
            if each._thread is not threading.current_thread():
                each._thread.join()
