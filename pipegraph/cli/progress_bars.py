"""A progress line: a bar where the output is a terminal, a few plain lines where it is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeRemainingColumn

PLAIN_STEPS = 4
"""Lines per task where the output is no terminal."""

_dropped = (
    False  # whether the interpreter dropped a Ctrl-C: one raised in a finalizer is printed, and no more
)


@contextmanager
def keeping_interrupts() -> Iterator[None]:
    """Remember interrupts that the interpreter would drop, for a progress line."""
    global _dropped
    _dropped = False
    before = sys.unraisablehook

    def remember(unraisable: Any) -> None:
        global _dropped
        if unraisable.exc_type is KeyboardInterrupt:
            _dropped = True
        else:
            before(unraisable)

    sys.unraisablehook = remember
    try:
        yield
    finally:
        sys.unraisablehook = before


def _check_interrupted() -> None:
    """Raises KeyboardInterrupt if one was dropped since the last look."""
    global _dropped
    if _dropped:
        _dropped = False
        raise KeyboardInterrupt


class ProgressLine:
    """Tasks one after another; each counts to its total and shows samples per second."""

    def __init__(self, title: str, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(quiet=quiet, highlight=False)
        self._live = self.console.is_terminal and not quiet
        self._title = title
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[note]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            transient=False,
            disable=not self._live,
        )
        self._total = 1.0
        self._samples = 0
        self._shown = 0
        self._started = 0.0
        self._from = 0.0
        self._name = ""
        self._unit = ""

    def __enter__(self) -> Self:
        if self._title:
            self.console.print(self._title, markup=False)
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    def start(self, name: str, total: float, unit: str = "images", done: float = 0.0) -> None:
        """Begin a task of ``total`` units of work, ``done`` of which are done."""
        self._name, self._total, self._unit = name, max(total, 1e-9), unit
        self._samples, self._started, self._from = 0, perf_counter(), done
        self._shown = int(PLAIN_STEPS * done / self._total)
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._task = self._bar.add_task(name, total=self._total, rate="", note="")
        self._bar.update(self._task, completed=done)

    def advance(self, done: float, samples: int, note: str = "") -> None:
        """``done`` units are done by now, with ``samples`` more. Raises a Ctrl-C that was dropped elsewhere."""
        _check_interrupted()
        self._samples += samples
        elapsed = max(perf_counter() - self._started, 1e-9)
        unit = "samples" if self._unit == "s" else self._unit
        rate = f"{self._samples / elapsed:,.0f} {unit}/s"
        if self._live:
            self._bar.update(self._task, completed=done, rate=rate, note=note)
            return
        step = int(PLAIN_STEPS * done / self._total)
        if step > self._shown:
            self._shown = step
            left = elapsed * (self._total - done) / max(done - self._from, 1e-9)
            eta = f"ETA {max(0.0, left):.0f} s"
            words = [f"{self._name}: {min(100, 100 * done / self._total):3.0f} %", rate, note, eta]
            self.console.print("  ".join(word for word in words if word), markup=False, soft_wrap=True)

    def count(self, name: str, done: int, total: int, note: str) -> None:
        """``done`` shards of a job are there."""
        if name == self._name:
            self.advance(done, 1, note)
        else:
            self.start(name, total, unit="shards", done=done)
