"""The tuner of one loader: measures windows as batches are asked for, and carries out what the search decides.

Everything happens in the training loop's thread, as it asks for a chunk; workers come and go in threads of their own.
Nothing waits: a window is over once enough time has passed and enough chunks were delivered, which is looked at
whenever one is asked for.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from time import perf_counter
from typing import Any, Protocol

from pipegraph.machine import available_memory, cores
from pipegraph.planning.plan import Plan
from pipegraph.planning.tunable import places_per_worker
from pipegraph.profile.bottleneck import LATE_S
from pipegraph.profile.values import Profile, Watched
from pipegraph.profile.what_if import demands
from pipegraph.tuning.decisions import Tuning
from pipegraph.tuning.facts import Facts, Limits, Queue, Size, Work
from pipegraph.tuning.search import Search

WINDOW_S, WINDOW_ITEMS = 0.4, 16
"""The minimum duration of a window, and its minimum number of chunks."""

LONG_S, LONG_ITEMS = 4.0, 4
"""One with fewer chunks is at least so long, and has at least these."""

SETTLE_S = 0.1
"""What is measured right after a change tells of neither."""

CALM_S = 2.0
"""Length of a window while nothing is tried: looking takes about 2 ms."""

WAITED = 0.02
"""Share of a window from which on a queue counts as having been waited for."""

COMPUTES = 0.5
"""Share of its work that a stage runs on a core, or waits for one, from which on each worker needs one."""

HOLDS = 0.7
"""Share of its work that a thread runs on a core where it can keep the GIL from others."""

PINNED_PART = 4
"""The part of the memory limit that may be pinned is one over this."""

logger = logging.getLogger("pipegraph")


class Resizable(Protocol):
    """The running stages; ``Staffing`` documents the methods."""

    def settled(self) -> bool: ...
    def refused(self) -> Mapping[str, BaseException]: ...
    def resize(self, stage: str, workers: int) -> None: ...
    def set_capacity(self, stage: str, capacity: int) -> None: ...


class Tuner:
    """Watches the passes of one loader. Its methods belong to the training loop's thread, but for ``tuning``."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tuned = {stage.name: stage for stage in plan.running if stage.tuned}
        sizes = {name: Size(stage.workers, stage.capacity) for name, stage in self._tuned.items()}
        self._search = Search(sizes)
        self._current = sizes
        self._loader: Any = None
        self._staffing: Resizable | None = None
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

    def begins(self, loader: Watched, staffing: Resizable) -> None:
        """A pass begins. The window continues, for only the time in passes counts."""
        self._loader = weakref.proxy(loader)
        if staffing is not self._staffing:
            self._staffing = staffing
            self._apply(self._current, force=True)
        self._settles_at = max(self._settles_at, perf_counter() + SETTLE_S)

    def asked(self, items: int) -> None:
        """The training loop asks for the next chunk, after this many."""
        now = perf_counter()
        if now < self._due or self._failed:
            return
        try:
            self._look(now, items)
        except Exception:
            self._failed = True
            logger.exception("autotune: stopped by an error of its own; sizes stay as they are")

    def _look(self, now: float, items: int) -> None:
        loader, staffing = self._loader, self._staffing
        assert staffing is not None
        if self._before is None:
            # Queues that were filled with other sizes, or workers that are still to come, tell of neither.
            for name, error in staffing.refused().items():
                self._refused[name] = f"{type(error).__name__}: {error}"
            if now >= self._settles_at and items and (staffing.settled() or self._refused):
                self._before = loader.profile()
                self._due = now + (CALM_S if self._search.settled else WINDOW_S)
                self._began, self._least = now, items + WINDOW_ITEMS
            return
        missing = self._least - items
        if missing > 0 and not (now > self._began + LONG_S and missing <= WINDOW_ITEMS - LONG_ITEMS):
            return
        facts = facts_of(self._plan, loader.profile(self._before), self._refused)
        self._refused, self._before = {}, None
        self._apply(self._search.next(facts))

    def _apply(self, sizes: dict[str, Size], force: bool = False) -> None:
        """Let the stages have these sizes.

        A step only raises or only lowers, and the next waits until everybody has come and gone: together they never
        exceed what was allowed.
        """
        staffing = self._staffing
        assert staffing is not None
        for name, size in sizes.items():
            if force or size.capacity != self._current[name].capacity:
                staffing.set_capacity(name, size.capacity)
            if "workers" in self._tuned[name].tuned and (
                force or size.workers != self._current[name].workers
            ):
                staffing.resize(name, size.workers)
        if sizes != self._current:
            self._settles_at = perf_counter() + SETTLE_S
            self._due = self._settles_at
        self._current = dict(sizes)


def facts_of(plan: Plan, found: Profile, refused: Mapping[str, str]) -> Facts:
    """A window's profile as the search takes it."""
    per_chunk = found.elapsed_s / max(1, found.items)
    needs = demands(found)
    stages = {}
    for planned in plan.running:
        name, seen, need = planned.name, found.stages[planned.name], needs[planned.name]
        running = (seen.running or 0.0) / seen.busy if seen.busy else 0.0
        coreless = seen.coreless / seen.busy if seen.busy else 0.0
        busy = seen.busy * seen.workers
        stages[name] = Work(
            name,
            need.seconds,
            need.core_s,
            size=Size(planned.workers, planned.capacity),
            workers="workers" in planned.tuned,
            capacity="capacity" in planned.tuned,
            computes=running + coreless > COMPUTES,
            locked=planned.backend.in_trainer
            and found.wake_s > LATE_S
            and (
                (running > HOLDS and coreless < 1 - HOLDS and busy > HOLDS)
                or (found.cause == "lock" and found.bottleneck == name)
            ),
            process=planned.backend.measurable,
            inline=planned.backend.in_consumer,
            least=(places_per_worker(planned), planned.capacity),
            item_bytes=seen.nbytes // seen.items if seen.items else 0,
            pinned=planned.memory == "pinned",
        )
    edges = tuple(
        Queue(
            queue.producer,
            queue.consumer,
            queue.get_wait_s > WAITED * found.elapsed_s,
            queue.put_wait_s > WAITED * found.elapsed_s,
            not queue.put_wait_s and queue.depth < queue.capacity / 4,
        )
        for queue in found.channels
    )
    budget = Limits(
        cores(),
        found.memory_limit,
        found.memory_peak_bytes,
        found.memory_limit // PINNED_PART,
        (found.measured.process_bytes if found.measured else 0, available_memory()),
    )
    return Facts(
        stages,
        edges,
        found.items / found.elapsed_s if found.elapsed_s else 0.0,
        found.stall_s / found.elapsed_s if found.elapsed_s else 0.0,
        found.step_s,
        found.cores_used * per_chunk,
        budget,
        refused,
    )
