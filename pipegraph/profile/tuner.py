"""The tuner of one loader: measures windows as batches are asked for, and carries out what the search decides.

Everything happens in the training loop's thread, as it asks for a chunk; workers come and go in threads of their own.
Nothing waits: a window is over once enough time has passed and enough chunks were delivered, which is looked at
whenever one is asked for.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pipegraph.machine import available_memory
from pipegraph.planning.plan import Plan
from pipegraph.profile.model import Size, pipeline_of
from pipegraph.profile.search import Search, Tuning, Window
from pipegraph.profile.values import Profile, Watched

if TYPE_CHECKING:
    from pipegraph.engine.crew import Crew

WINDOW_S, WINDOW_ITEMS = 0.4, 16
"""The minimum duration of a window, and its minimum number of chunks."""

LONG_S, LONG_ITEMS = 4.0, 4
"""One with fewer chunks is at least so long, and has at least these."""

SETTLE_S = 0.1
"""What is measured right after a change tells of neither."""

logger = logging.getLogger("pipegraph")


class Tuner:
    """Watches the passes of one loader. Its methods belong to the training loop's thread, but for ``tuning``."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tuned = {stage.name: stage for stage in plan.running if stage.tuned}
        sizes = {name: Size(stage.workers, stage.capacity) for name, stage in self._tuned.items()}
        self._search = Search(sizes)
        self._current = sizes
        self._loader: Any = None
        self._crew: Crew | None = None
        self._before: Profile | None = None
        self._due = self._settles_at = 0.0
        self._began = 0.0
        self._least = 0  # chunks at which the window may end
        self._refused: dict[str, str] = {}
        self._failed = False

    @property
    def tuning(self) -> Tuning:
        """What was decided so far. Thread-safe."""
        return self._search.tuning

    def begins(self, loader: Watched, crew: Crew) -> None:
        """A pass begins. The window continues, for only the time in passes counts."""
        self._loader = weakref.proxy(loader)
        if crew is not self._crew:
            self._crew = crew
            self._apply(self._current, force=True)
        self._settles_at = max(self._settles_at, perf_counter() + SETTLE_S)

    def asked(self, items: int) -> None:
        """The training loop asks for the next chunk, after this many."""
        now = perf_counter()
        if now < self._due or self._failed or self._search.settled:
            return
        try:
            self._look(now, items)
        except Exception:
            self._failed = True
            logger.exception("autotune: stopped by an error of its own; sizes stay as they are")

    def _look(self, now: float, items: int) -> None:
        loader, crew = self._loader, self._crew
        assert crew is not None
        if self._before is None:
            # Queues that were filled with other sizes, or workers that are still to come, tell of neither.
            for name, error in crew.refused().items():
                self._refused[name] = f"{type(error).__name__}: {error}"
            if now >= self._settles_at and items and (crew.settled() or self._refused):
                self._before = loader.profile()
                self._due = now + WINDOW_S
                self._began, self._least = now, items + WINDOW_ITEMS
            return
        missing = self._least - items
        if missing > 0 and not (now > self._began + LONG_S and missing <= WINDOW_ITEMS - LONG_ITEMS):
            return
        window = window_of(self._plan, loader.profile(self._before), self._refused)
        self._refused, self._before = {}, None
        self._apply(self._search.next(window))

    def _apply(self, sizes: dict[str, Size], force: bool = False) -> None:
        """Let the stages have these sizes.

        A step only raises or only lowers, and the next waits until everybody has come and gone: together they never
        exceed what was allowed.
        """
        crew = self._crew
        assert crew is not None
        for name, size in sizes.items():
            if force or size.capacity != self._current[name].capacity:
                crew.set_capacity(name, size.capacity)
            if "workers" in self._tuned[name].tuned and (
                force or size.workers != self._current[name].workers
            ):
                crew.resize(name, size.workers)
        if sizes != self._current:
            self._settles_at = perf_counter() + SETTLE_S
            self._due = self._settles_at
        self._current = dict(sizes)


def window_of(plan: Plan, found: Profile, refused: Mapping[str, str]) -> Window:
    """A window's profile as the search takes it."""
    pipeline = pipeline_of(found)
    works = dict(pipeline.works)
    for stage in plan.running:
        if "workers" not in stage.tuned and works[stage.name].most > stage.workers:
            works[stage.name] = replace(
                works[stage.name], most=stage.workers, why="its workers are not tuned"
            )
    limits = replace(pipeline.limits, process=(pipeline.limits.process[0], available_memory()))
    return Window(
        # A trial shows whether more threads get more cores.
        replace(pipeline, works=works, limits=limits, full=False),
        found.stall_share,
        frozenset(each.producer for each in found.channels if each.in_bursts),
        frozenset(each.name for each in plan.running if "capacity" not in each.tuned),
        refused,
    )
