"""A live view in the terminal: how far the pass is, and every stage with its rate and its queue.

Redrawn in place where the output is a terminal, else shown once at the end. Needs the ``cli`` extra (rich).
``log_every=`` writes lines to the log, without it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pipegraph.errors import GraphError, extra_module, shown
from pipegraph.measurements import StageProfile, in_view
from pipegraph.units import format_share, shorten

from .bottleneck import CONSUMER, STARTING
from .values import Profile, Watched

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

logger = logging.getLogger("pipegraph")

REDRAW_S = 0.25

OTHER_COLUMNS = 52
"""Characters that all columns but the name take; in narrower terminals the last ones are cut."""

SHORTEST_NAME = 12

BAR = 10
"""Characters of a queue's bar."""


class Live:
    """``pg.live(loader)``: shows a loader's passes while they run; a context manager, and an iterator over one pass.

    ::

        for batch in pg.live(loader): ...

        with pg.live(loader):
            for epoch in range(3):
                for batch in loader: ...

    Args:
        loader: whose passes are shown.
        console: where; by default the standard error, so that what a program prints stays apart.

    Raises:
        GraphError: ``loader`` is none.
        MissingExtraError: rich is not installed.
    """

    def __init__(self, loader: Watched, console: Console | None = None) -> None:
        rich = extra_module("rich.console", "cli", "the live view", "rich")
        if not hasattr(loader, "profile"):
            raise GraphError(f"live: expected a loader, as graph.loader() makes it, got {shown(loader)}")
        self._loader = loader
        self._console = console or rich.Console(stderr=True, highlight=False)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._view: Any = None
        self._last = loader.profile()
        self._begun = 0.0

    def __enter__(self) -> Self:
        self._begun = perf_counter()
        from rich.live import Live as View

        self._view = View(console=self._console, auto_refresh=False, transient=False)
        self._view.__enter__()
        self._thread = threading.Thread(target=self._watch, name="pipegraph-live", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._show(whole=True)
        self._view.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[Any]:
        with self:
            yield from self._loader

    def _watch(self) -> None:
        while not self._over.wait(REDRAW_S):
            self._show()

    def _show(self, whole: bool = False) -> None:
        self._view.update(self._draw(whole), refresh=True)

    def _draw(self, whole: bool = False) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self._loader.profile(None if whole else self._last)
        if not whole and now.elapsed_s > 1:
            self._last = self._loader.profile()  # rates are of the last second or so
        epoch, done = now.measured.in_pass if now.measured else (0, 0)
        total = None
        with suppress(TypeError):
            total = len(self._loader)
        words = [f"epoch {epoch}", f"{done:,}" + (f"/{total:,}" if total else "")]
        words += [f"{now.samples_per_s:,.0f} samples/s", f"{perf_counter() - self._begun:.0f} s"]
        if total and now.items and not whole:
            left = max(0, total - done) * now.elapsed_s / now.items
            words.append(f"{left:.0f} s left")
        head = Table.grid()
        head.add_row(Text(", ".join(words), overflow="ellipsis", no_wrap=True))
        if total:
            width = min(60, self._console.width)
            head.add_row(ProgressBar(total=total, completed=min(done, total), width=width))
        table = Table(box=None, padding=(0, 1), pad_edge=False)
        columns = in_view(StageProfile, "live")
        table.add_column("stage", no_wrap=True)
        for _, _, title in columns:
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("queue", no_wrap=True)
        room = max(SHORTEST_NAME, self._console.width - OTHER_COLUMNS)
        for name, stage in now.stages.items():
            if stage.workers:
                holds = now.conclusive and name == now.bottleneck
                label = Text(shorten(name, room), style="bold red" if holds else "")
                cells = [each.text(getattr(stage, field)) for field, each, _ in columns]
                table.add_row(label, *cells, Text(queue_bar(now, name)))
        stall = now.stall_share
        training = Text("training", style="bold red" if now.conclusive and now.bottleneck == CONSUMER else "")
        of_training = {"busy": format_share(1 - stall)}
        table.add_row(
            training, *(of_training.get(field, "") for field, _, _ in columns), f"waits {format_share(stall)}"
        )
        return Group(head, table)


def queue_bar(profile: Profile, stage: str) -> str:
    """The fill of the fullest queue behind a stage: ``███───────  3/10``."""
    queues = [channel for channel in profile.channels if channel.producer == stage]
    if not queues:
        return ""
    fullest = max(queues, key=lambda each: each.depth / each.capacity)
    filled = min(BAR, round(BAR * fullest.depth / fullest.capacity))
    return f"{'█' * filled}{'─' * (BAR - filled)} {fullest.depth}/{fullest.capacity}"


class LogLines:
    """Logs a line as a chunk is asked for, if ``every`` seconds have passed since the last; starts no thread."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._loader: Any = None
        self._last: Profile | None = None
        self._due = 0.0

    def begins(self, loader: Watched, crew: object) -> None:
        """A pass begins. Rates continue, for only the time in passes counts."""
        if self._last is None:
            self._loader = weakref.proxy(loader)
            self._last, self._due = loader.profile(), perf_counter() + self._every

    def asked(self, items: int) -> None:
        """The training loop asks for the next chunk, after this many."""
        now = perf_counter()
        if now < self._due:
            return
        self._due = now + self._every
        found = self._loader.profile(self._last)
        self._last = self._loader.profile()
        epoch, done = found.measured.in_pass
        stall = found.stall_share
        words = (
            f"graph {found.graph!r}, epoch {epoch}, {done:,} delivered: {found.samples_per_s:,.0f} samples/s"
        )
        trains = found.bottleneck == CONSUMER
        pace = f", {'training' if trains else found.bottleneck} sets the pace"
        # Who sets the pace is left out where the passes do not say, as while queues first fill.
        said = found.conclusive and not (trains and stall > STARTING)
        logger.info("%s, waited %.0f %%%s", words, 100 * stall, pace * said)


live = Live
