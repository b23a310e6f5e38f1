"""Gates and sequencers: hold workers at a known point and order events."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator
from pipegraph.engine.activity import Cancelled

HANGS_S = 60


@dataclass
class _Door:
    """What all copies of a gate share."""

    condition: threading.Condition = field(default_factory=threading.Condition)
    passes: int = 0
    positions: set[int] = field(default_factory=set)
    open: bool = False
    waiting: list[int] = field(default_factory=list)


@dataclass
class _Run:
    """Whether the workers of one loader must wait no more. Changes under the door's condition."""

    cancelled: bool = False


@final
class Gate(Operator):
    """Passes chunks on, each once the test has released it.

    Put it where a stage should wait; with several workers, several items wait at it at once, and
    releasing them by position decides in which order they continue.
    """

    name = "gate"
    depends_on = "item"

    def __init__(self) -> None:
        self._door = _Door()
        self._run = _Run()

    def open(self, context: Context) -> None:
        self._run = context.share("run", _Run)  # the end of one loader is not that of another

    def process(self, chunk: Chunk) -> Chunk:
        door, run, position = self._door, self._run, int(chunk.lineages[0][1])
        with door.condition:
            door.waiting.append(position)
            door.condition.notify_all()
            try:
                door.condition.wait_for(lambda: run.cancelled or self._may_pass(position))
            finally:
                door.waiting.remove(position)
            if run.cancelled:
                raise Cancelled
            if position in door.positions:
                door.positions.remove(position)
            elif not door.open:
                door.passes -= 1
        return chunk

    def _may_pass(self, position: int) -> bool:
        door = self._door
        return door.open or door.passes > 0 or position in door.positions

    def cancel(self) -> None:
        with self._door.condition:
            self._run.cancelled = True
            self._door.condition.notify_all()

    def uncancel(self) -> None:
        with self._door.condition:
            self._run.cancelled = False

    def release(self, count: int = 1) -> None:
        """Let ``count`` more items pass, whichever come."""
        with self._door.condition:
            self._door.passes += count
            self._door.condition.notify_all()

    def release_position(self, *positions: int) -> None:
        """Let the items at these global positions pass."""
        with self._door.condition:
            self._door.positions.update(positions)
            self._door.condition.notify_all()

    def release_all(self) -> None:
        """Let everything pass, now and from now on."""
        with self._door.condition:
            self._door.open = True
            self._door.condition.notify_all()

    def wait_until_waiting(self, count: int) -> list[int]:
        """Blocks until at least ``count`` items wait at the gate; returns their positions.

        Raises:
            AssertionError: they do not come within a minute.
        """
        with self._door.condition:
            come = self._door.condition.wait_for(lambda: len(self._door.waiting) >= count, HANGS_S)
            waiting = sorted(self._door.waiting)
        if not come:
            raise AssertionError(f"after {HANGS_S} s only positions {waiting} wait at the gate, not {count}")
        return waiting


class Sequencer:
    """Makes blocks in different threads run in the order of their numbers.

    After trio's ``Sequencer``: https://trio.readthedocs.io/en/stable/reference-testing.html
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._next = 0
        self._used: set[int] = set()

    @contextmanager
    def __call__(self, number: int) -> Iterator[Any]:
        """Blocks until the blocks 0 .. number-1 have been left.

        Raises:
            AssertionError: they are not left within a minute.
            ValueError: the block was entered before.
        """
        with self._condition:
            if number in self._used:
                raise ValueError(f"block {number} of this Sequencer was entered before")
            self._used.add(number)
            if not self._condition.wait_for(lambda: self._next == number, HANGS_S):
                raise AssertionError(f"block {number} waits for {self._next}, not left after {HANGS_S} s")
        try:
            yield
        finally:
            with self._condition:
                self._next += 1
                self._condition.notify_all()
