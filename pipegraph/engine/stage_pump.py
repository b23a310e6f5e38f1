"""Runs an inline stage: whichever thread waits for its output drives it, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

from pipegraph import global_generators
from pipegraph.engine.activity import Cancelled

MORE = object()
"""Given by a loop between two steps if the next one waits for nobody."""


class StagePump:
    """See the module docstring.

    Args:
        left: called when a driver has left.

    Attributes:
        more: whether the next step waits for nobody.
    """

    def __init__(self, loop: Iterator[Any], left: Callable[[], None]) -> None:
        self._loop = loop
        self._left = left
        self._lock = threading.Lock()
        self._busy = False
        self._over = False
        self.more = False

    def try_enter(self) -> bool:
        """Become the driver; False while another thread is."""
        with self._lock:
            if self._busy:
                return False
            self._busy = True
            return True

    def step(self) -> None:
        """One unit of work."""
        self.more = False
        entered = global_generators.enter()  # the consumer's thread has numbers of its own
        try:
            for more in self._loop:
                self.more = more is MORE
                return
        finally:
            if entered:
                global_generators.leave()
        raise Cancelled  # it has ended by an error, which its driver had

    def leave(self) -> None:
        """Free the role, then let another waiter look again: it may have found us busy."""
        with self._lock:
            self._busy = over = self._over
        if over:
            self._close()
        self._left()

    def end(self) -> None:
        """Nobody may drive from now on: end the loop, and with it what it holds open, such as a user's generator.

        Where somebody is driving still, that is done as they leave.
        """
        with self._lock:
            busy, self._busy, self._over = self._busy, True, True
        if not busy:
            self._close()

    def _close(self) -> None:
        assert isinstance(self._loop, Generator)
        self._loop.close()
