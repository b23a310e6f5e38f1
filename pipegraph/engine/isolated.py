"""The trainer's half of a loader with ``isolate=True``: a runtime of the stages below the cut.

States are made in the trainer alone, from cursors that chunks bring along and from what the sidecar reports with them;
only the profile asks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pipegraph.engine.pass_totals import Totals
from pipegraph.engine.process.sidecar import Sidecar
from pipegraph.engine.run import Run
from pipegraph.engine.runtime import Runtime
from pipegraph.engine.stage.restore import Resume, restarts
from pipegraph.engine.stage.snapshots import Snapshots
from pipegraph.engine.stage.stage_run import Meter
from pipegraph.planning.isolation import Elsewhere, Isolation
from pipegraph.planning.plan import StagePlan

CROSSED, COPIED = 4, 2
"""One part in so many of the memory limit is the trainer's: for chunks that have crossed, or for their copies too."""


class IsolatedRun(Run):
    """A run of the stages below the cut."""

    def __init__(self, runtime: IsolatedRuntime, epoch: int, horizon: float, resume: Resume) -> None:
        super().__init__(runtime, epoch, horizon, Resume(history=resume.history, stream=resume.stream))
        runtime.runs += 1
        self.number = runtime.runs
        self._runtime: IsolatedRuntime = runtime
        self._asked = epoch, horizon, resume
        self._steps = restarts(runtime.isolation.whole, resume.cursor).steps
        self.snapshots = {stage.name: Snapshots(stage.name) for stage in runtime.isolation.whole.running}
        for name, snapshot in resume.iterators.items():
            self.snapshots[name].begin(epoch, snapshot)

    def start(self) -> tuple[Any, ...]:
        """What the sidecar's run begins with."""
        return (*self._asked, self.ledger.base)

    def first_step(self, source: str) -> int:
        """The step at which a source began in the run's first epoch."""
        return self._steps[source]

    def source(self, stage: str) -> Any:
        """Answers where a source's steps lie, from the sidecar."""
        sidecar = self._runtime.sidecar
        return None if sidecar is None else _Positions(sidecar, stage)

    def cancel(self) -> None:
        """Wake everybody, in the sidecar too."""
        super().cancel()
        sidecar = self._runtime.sidecar
        if sidecar is not None and sidecar.number == self.number:
            sidecar.cancel()


class _Positions:
    """The one question that states have of a source: which positions lie behind a restart."""

    def __init__(self, sidecar: Sidecar, stage: str) -> None:
        self._sidecar = sidecar
        self._stage = stage

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        """Without an answer none: then a state keeps more than it must."""
        found: list[int] = self._sidecar.ask("positions", self._stage, steps, epoch, rank, world_size) or []
        return found


class IsolatedRuntime(Runtime):
    """Owns the trainer's threads and the sidecar."""

    def __init__(
        self, isolation: Isolation, memory_limit: int, seed: int, rank: int, world_size: int
    ) -> None:
        stages = isolation.below.stages
        here = max(1, memory_limit // (CROSSED if len(stages) == 1 else COPIED))
        below = {
            name: replace(
                stage, spec=replace(stage.spec, max_bytes=max(1, min(here, memory_limit // CROSSED)))
            )
            if isinstance(stage.operator, Elsewhere)
            else stage
            for name, stage in stages.items()
        }
        super().__init__(replace(isolation.below, stages=below), here, seed, rank, world_size)
        self.isolation = isolation
        self._there = max(1, memory_limit - here)
        self.sidecar: Sidecar | None = None
        self.runs = 0
        self._reports: dict[str, dict[str, Any]] = {}
        self._starting_run: IsolatedRun | None = None  # which the sidecar may have begun before anybody looks
        self._last: tuple[int, Totals] = 0, Counter()  # run and totals, as the sidecar reported them last
        first = [stage for stage in self.plan.running if stage.upstream]
        self._first = (first[0].name if first else "", 0)  # the edge that crosses

    def make_operator(self, stage: StagePlan, index: int) -> Any:
        if not isinstance(stage.operator, Elsewhere):
            return super().make_operator(stage, index)
        assert self._processes is not None
        facts = self._there, self.seed, self.rank, self.world_size
        self.sidecar = self._processes.sidecar(self.isolation.above, facts)
        return self.sidecar

    def _make_run(self, epoch: int, horizon: float, resume: Resume) -> Run:
        run = IsolatedRun(self, epoch, horizon, resume)
        self.look_elsewhere(run)
        self._starting_run = run
        return run

    # -- looking -------------------------------------------------------------------------------

    def planned(self, stage: str) -> StagePlan:
        """A stage of either side."""
        found = self.plan.stages.get(stage)
        return self.isolation.whole.stages[stage] if found is None else found

    def look_elsewhere(self, run: Run) -> Totals:
        """What the sidecar's stages have counted; asks it, but for the first look at a run: that is from before it."""
        assert isinstance(run, IsolatedRun)
        if self._starting_run is run:
            self._starting_run = None
            return self._seen(run)
        found = None if self.sidecar is None else self.sidecar.ask("profile")
        if found is None:
            return self._seen(run)
        number, totals, meters, grown, counters, self._reports = found
        for name, values in meters.items():
            self.meters[name] = [Meter.of(values)]
        self.grown.update(grown)
        self.counters.update(counters)
        self._last = number, totals
        return self._seen(run)

    def _seen(self, run: IsolatedRun) -> Totals:
        number, totals = self._last
        seen: Totals = Counter()
        if number != run.number:  # that run has not begun there: it has not waited for anything
            return seen
        for key, value in totals.items():
            if key == ("put", "", 0):
                seen["put", *self._first] = value
            elif key[0] in ("put", "get", "memory", "process") and key != ("get", "", 0):
                seen[key] = value
        return seen

    def shared(self, stage: str) -> dict[str, Any]:
        """The sidecar's reports as they were seen last."""
        return self._reports.get(stage) or super().shared(stage)
