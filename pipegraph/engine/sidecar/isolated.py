"""The trainer's half of a loader with ``isolate=True``: a runtime for the stages below the cut.

States are made in the trainer, from the cursors of chunks and from what the sidecar reports with these. The trainer
asks the sidecar only for profiles and, to prune states, for positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pipegraph.engine.meter import Meter
from pipegraph.engine.run import Run
from pipegraph.engine.runtime import Runtime
from pipegraph.engine.sidecar.sidecar import CloseErrors, Sidecar, SidecarHost
from pipegraph.engine.stage.restore import Resume, restarts
from pipegraph.engine.stage.snapshots import Snapshots
from pipegraph.errors import MemoryLimitError, note
from pipegraph.measured import Edge, QueueLook
from pipegraph.planning.isolation import Isolation, RemoteStages
from pipegraph.planning.plan import StagePlan
from pipegraph.stage_spec import StageSpec
from pipegraph.totals import Totals
from pipegraph.units import format_bytes

CROSSED, COPIED = 4, 2
"""The trainer's share of the memory limit is 1/4 if it only receives chunks, 1/2 if it also copies them."""


make_host: Any = SidecarHost


class IsolatedRun(Run):
    """A run of the stages below the cut."""

    def __init__(self, runtime: IsolatedRuntime, epoch: int, horizon: float, resume: Resume) -> None:
        super().__init__(runtime, epoch, horizon, Resume(history=resume.history, stream=resume.stream))
        runtime.runs += 1
        self.number = runtime.runs
        self._runtime = runtime
        self._asked = epoch, horizon, resume
        sources = [stage.source for stage in runtime.isolation.whole.running]
        # One call to the sidecar at a time: none may wait there for a pass to begin.
        self.reads_ahead = all(source.reads_ahead for source in sources if source is not None)
        self._steps = restarts(runtime.isolation.whole, resume.cursor, resume.begun).steps
        self.snapshots = {stage.name: Snapshots(stage.name) for stage in runtime.isolation.whole.running}
        for name, snapshot in resume.iterators.items():
            self.snapshots[name].begin(epoch, snapshot)

    def start(self) -> tuple[Any, ...]:
        """The arguments with which the sidecar starts its run."""
        return self._asked

    def judges(self, stage: str) -> StageSpec:
        """The policy of a stage, by the name under which its failures are recorded."""
        running = self._runtime.isolation.whole.running
        return next(each.spec for one in running for each in (one, *one.followers) if each.judged == stage)

    def first_step(self, source: str) -> int:
        """The step at which a source began in the run's first epoch."""
        return self._steps[source]

    def positions_of(self, source: str, steps: range, epoch: int) -> Iterable[int]:
        """As the source's own; empty if the sidecar does not answer: a state then keeps more than it must."""
        sidecar = self._runtime.sidecar
        found = None if sidecar is None else sidecar.ask("positions", source, steps, epoch)
        return found or ()

    def fail(self, error: BaseException) -> None:
        """As the base class's; one half's limit, which the error names, is not the one that the loader was given."""
        if isinstance(error, MemoryLimitError):
            own, rest = self.account.limit, self._runtime.sidecar_limit
            note(
                error,
                f"isolate=True: the loader's memory_limit is {format_bytes(own + rest)}, of which the stages of the "
                f"process have {format_bytes(rest)}, and the trainer, for what it receives, {format_bytes(own)}",
            )
        super().fail(error)

    def cancel(self) -> None:
        """Wake all waiting threads, in the sidecar too."""
        super().cancel()
        sidecar = self._runtime.sidecar
        if sidecar is not None and sidecar.number == self.number:
            sidecar.cancel()


class IsolatedRuntime(Runtime):
    """The runtime of the trainer's threads, which also owns the sidecar."""

    def __init__(
        self, isolation: Isolation, memory_limit: int, seed: int, rank: int, world_size: int
    ) -> None:
        stages = isolation.below.stages
        own_limit = max(1, memory_limit // (CROSSED if len(stages) == 1 else COPIED))
        below = {
            name: replace(
                stage, spec=replace(stage.spec, max_bytes=max(1, min(own_limit, memory_limit // CROSSED)))
            )
            if isinstance(stage.operator, RemoteStages)
            else stage
            for name, stage in stages.items()
        }
        super().__init__(replace(isolation.below, stages=below), own_limit, seed, rank, world_size)
        self.isolation = isolation
        self.sidecar_limit = max(1, memory_limit - own_limit)
        self.sidecar: Sidecar | None = None
        self.runs = 0
        self._starting_run: IsolatedRun | None = None  # not counted before it starts
        self._queues: dict[Edge, QueueLook] = {}  # of the sidecar, at its last report
        self._last: tuple[int, Totals] = 0, Counter()  # run number and totals of the sidecar's last report
        first = [stage for stage in self.plan.running if stage.upstream]
        self._first = (first[0].name if first else "", 0)  # the edge that crosses

    def make_operator(self, stage: StagePlan, index: int) -> Any:
        if not isinstance(stage.operator, RemoteStages):
            return super().make_operator(stage, index)
        facts = self.sidecar_limit, self.seed, self.rank, self.world_size
        host = make_host(
            self._pools[stage.backend], self.isolation.above, facts, self.context(stage.name, index)
        )
        self.sidecar = Sidecar(host, stage.operator, stage.name, None)
        return self.sidecar

    def _make_run(self, epoch: int, horizon: float, resume: Resume) -> Run:
        run = IsolatedRun(self, epoch, horizon, resume)
        self.remote_totals(run)
        self._starting_run = run
        return run

    def errors_of_close(self, stage: str, error: BaseException) -> Sequence[str]:
        return error.args if isinstance(error, CloseErrors) else super().errors_of_close(stage, error)

    # -- inspection ----------------------------------------------------------------------------

    def planned(self, stage: str) -> StagePlan:
        """A stage of either half."""
        found = self.plan.stages.get(stage)
        return self.isolation.whole.stages[stage] if found is None else found

    def remote_totals(self, run: Run) -> Totals:
        """The counters of the sidecar's stages. Asks the sidecar, except for a run's first call: the run may have begun
        there already, so its start is taken from the last report."""
        assert isinstance(run, IsolatedRun)
        if self._starting_run is run:
            self._starting_run = None
            return self._totals_of(run)
        found = None if self.sidecar is None else self.sidecar.ask("profile")
        if found is None:
            return self._totals_of(run)
        number, counted = found
        for name, took in counted.durations.items():
            self.meters[name] = [Meter.of(counted.of(name)[0], took)]
        self.grown.update(counted.grown)
        self.counters.update(counted.counters)
        self._queues = dict(counted.queues) or self._queues
        self._last = number, counted.passes
        return self._totals_of(run)

    def with_remote(self, queues: dict[Edge, QueueLook]) -> dict[Edge, QueueLook]:
        """The last queue there and the first one here count as one: the cut lies inside it."""
        found = {**self._queues, **queues}
        there, here = self._queues.get(("", 0)), queues.get(self._first)
        if there is not None and here is not None:
            found[self._first] = QueueLook(
                there.capacity + here.capacity,
                there.depth + here.depth,
                there.nbytes + here.nbytes,
                there.gained + here.gained,
            )
        return found

    def _totals_of(self, run: IsolatedRun) -> Totals:
        number, totals = self._last
        seen: Totals = Counter()
        if number != run.number:  # reported before this run began, which has counted nothing yet
            return seen
        for key, value in totals.items():
            if key == ("put", "", 0):
                seen["put", *self._first] = value
            elif key[0] in ("put", "get", "process") and key != ("get", "", 0):
                seen[key] = value
        return seen
