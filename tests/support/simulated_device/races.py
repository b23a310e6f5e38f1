"""Finds pieces of work that no event orders and that touch the same memory, one of them writing.

A happens-before check with vector clocks (Lamport 1978; Mattern 1989), from the trace of the simulated device: each
stream has a clock, and so has the host. An event carries its stream's clock to the streams that wait for it; who
synchronizes takes it to the host, and everything given later comes after. An allocation counts as a write, for its
memory may have been freed while another stream reads it. All threads of the host share one clock: what one of them waited for counts as ordered
for all, so a race that is reported is one, and a loop that waits for every batch hides some.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulated_device import NAME, native

ROOT = str(Path(__file__).parents[3])
PAGE = 4096
DEPTH = 4
"""Frames of the caller that are shown."""
FOLDERS = ("/pipegraph/", "/operators/", "/tests/", "/benchmarks/", "/docs/")
"""Of the repository: frames of installed packages say nothing of a wait."""
PASSED_ON = ("tests/support/simulated_device", "pipegraph/device/accelerator.py")
"""What only passes work on to the device is not where it comes from."""

StreamKey = tuple[int, int]
Clock = dict[StreamKey, int]


@dataclass(frozen=True, slots=True)
class Access:
    """One piece of work, and the bytes that it reads or writes."""

    stream: StreamKey
    time: int
    start: int
    nbytes: int
    writes: bool
    what: str
    where: tuple[str, ...]

    def overlaps(self, other: Access) -> bool:
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes

    def covers(self, other: Access) -> bool:
        return self.start <= other.start and other.start + other.nbytes <= self.start + self.nbytes

    def __str__(self) -> str:
        device, stream = self.stream
        done = "written" if self.writes else "read"
        places = " < ".join(self.where) or "the autograd engine"
        return f"{done} by {self.what} on stream {stream} of {NAME}:{device}, given by {places}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to the same bytes that no event orders; ``times`` they were seen from these two places."""

    first: Access
    second: Access
    times: int

    def __str__(self) -> str:
        return f"race, seen {self.times} times: memory is {self.first};\n    then, ordered by no event, {self.second}"


@dataclass
class Watch:
    """The trace of a block, and the races in it."""

    _trace: list[tuple[Any, ...]] = field(default_factory=list)

    def _heard(self, *entry: Any) -> None:
        # Called wherever memory is freed, also by the garbage collector: it only appends.
        self._trace.append((*entry, _callers() if entry[1] in ("work", "allocation") else ()))

    @property
    def pieces(self) -> int:
        """How many pieces of work were seen."""
        return sum(entry[1] == "work" for entry in self._trace)

    def races(self) -> list[Race]:
        """Those seen so far."""
        order = _Order()
        for entry in sorted(self._trace, key=lambda entry: entry[0]):
            order.take(*entry[1:])
        return [Race(first, second, times) for first, second, times in order.races.values()]

    def check(self) -> None:
        """Raises:
        AssertionError: there are races; it names both sides of each.
        """
        found = self.races()
        assert not found, "\n".join(map(str, found))


class _Order:
    """The clocks, and the last accesses to each page of memory."""

    def __init__(self) -> None:
        self._host: Clock = {}
        self._streams: defaultdict[StreamKey, Clock] = defaultdict(dict)
        self._events: dict[int, Clock] = {}
        self._pages: defaultdict[int, list[Access]] = defaultdict(list)
        self.races: dict[tuple[Any, ...], tuple[Access, Access, int]] = {}

    def take(
        self,
        kind: str,
        device: int,
        stream: int,
        a: int,
        b: int,
        name: str,
        accesses: list[tuple[int, int, bool]],
        where: tuple[str, ...],
    ) -> None:
        key = (device, stream)
        if kind == "work":
            self._work(key, accesses, name, where)
        elif kind == "allocation":
            self._work(key, [(a, b, True)], "whoever was given the freed memory", where)
        elif kind == "record":
            self._events[a] = dict(self._now(key))
        elif kind == "wait":
            _join(self._streams[key], self._events.get(a, {}))
        elif kind == "join":
            _join(self._streams[key], self._now((a, b)))
        elif kind == "synchronize event":
            _join(self._host, self._events.get(a, {}))
        elif kind == "synchronize stream":
            _join(self._host, self._now(key))
        elif kind == "synchronize device":
            for each in [each for each in self._streams if each[0] == device]:
                _join(self._host, self._now(each))
        elif kind == "pinned":
            for page in _pages(a, b):
                self._pages[page] = [old for old in self._pages[page] if not (a <= old.start < a + b)]

    def _now(self, key: StreamKey) -> Clock:
        """A stream's clock: what it is given now comes after all that the host has waited for."""
        clock = self._streams[key]
        _join(clock, self._host)
        return clock

    def _work(
        self, key: StreamKey, accesses: list[tuple[int, int, bool]], what: str, where: tuple[str, ...]
    ) -> None:
        clock = self._now(key)
        time = clock[key] = clock.get(key, 0) + 1
        for start, nbytes, writes in accesses:
            if nbytes:
                self._touch(Access(key, time, start, nbytes, writes, what, where), clock)

    def _touch(self, new: Access, clock: Clock) -> None:
        for page in _pages(new.start, new.nbytes):
            kept = []
            for old in self._pages[page]:
                ordered = clock.get(old.stream, 0) >= old.time
                if not ordered and (new.writes or old.writes) and new.overlaps(old):
                    self._note(old, new)
                # A later access that is ordered after it, and conflicts with no less, stands for it.
                if not (
                    ordered
                    and new.covers(old)
                    and (new.writes or (old.stream == new.stream and not old.writes))
                ):
                    kept.append(old)
            kept.append(new)
            self._pages[page] = kept

    def _note(self, old: Access, new: Access) -> None:
        kind = (old.where, new.where, old.what, new.what, old.writes, new.writes)
        first, second, times = self.races.get(kind, (old, new, 0))
        self.races[kind] = (first, second, times + 1)


def _join(clock: Clock, other: Clock) -> None:
    for key, time in other.items():
        if clock.get(key, 0) < time:
            clock[key] = time


def _pages(start: int, nbytes: int) -> range:
    return range(start // PAGE, (start + nbytes - 1) // PAGE + 1)


def _callers() -> tuple[str, ...]:
    """File and line of the innermost callers in this repository."""
    found: list[str] = []
    frame = sys._getframe()
    while frame is not None and len(found) < DEPTH:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and any(folder in name[len(ROOT) :] for folder in FOLDERS):
            inside = name[len(ROOT) + 1 :]
            if not inside.startswith(PASSED_ON):
                found.append(f"{inside}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


@contextmanager
def watched() -> Iterator[Watch]:
    """Trace the simulated device inside the block. Blocks do not nest."""
    watch = Watch()
    native().listen(watch._heard)
    try:
        yield watch
    finally:
        native().listen(None)
