"""A progress bar where the output is a terminal; plain lines of what is said everywhere."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressLine:
    """Tasks one after another; each counts to its total and shows samples per second."""

    def __init__(self, title: str = "", quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(quiet=quiet, highlight=False)
        self._title = title
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[note]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self._name = self._unit = ""
        self._samples = self._done = 0
        self._started = 0.0

    def __enter__(self) -> Self:
        if self._title:
            self.say(self._title)
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
        self._name, self._unit, self._samples, self._started = name, unit, 0, perf_counter()
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._task = self._bar.add_task(name, total=total, completed=done, note="")  # type: ignore[arg-type]

    def advance(self, done: float, samples: int, note: str = "") -> None:
        """``done`` units are done by now, with ``samples`` more."""
        self._samples += samples
        rate = self._samples / max(perf_counter() - self._started, 1e-9)
        self._bar.update(self._task, completed=done, note=f"{rate:,.0f} {self._unit}/s  {note}")

    def count(self, name: str, done: int, total: int, note: str, unit: str = "shards") -> None:
        """``done`` units of a job are there."""
        if name == self._name:
            self.advance(done, done - self._done, note)
        else:
            self.start(name, total, unit, done)
        self._done = done
