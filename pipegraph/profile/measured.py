"""The counters of a loader as a value, over its life or an interval; profiles are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipegraph.durations import Durations
from pipegraph.machine import cores

from .reports import Report

if TYPE_CHECKING:
    from pipegraph.engine.pass_totals import Gauges, Totals
    from pipegraph.engine.runtime import Runtime
    from pipegraph.loader.loader import Loader

COUNTERS = ("busy_ns", "calls", "items", "samples", "nbytes", "failed", "retried", "dropped")


@dataclass(frozen=True)
class StageCounts:
    """One stage: sums over its workers.

    Attributes:
        coreless_ns: how long its threads and processes were ready to run and had no core.
        child_ns: how long its processes ran on a core.
        durations: of its calls.
        counters, reports: what the operator counts and reports itself.
    """

    busy_ns: int = 0
    calls: int = 0
    items: int = 0
    samples: int = 0
    nbytes: int = 0
    failed: int = 0
    retried: int = 0
    dropped: int = 0
    coreless_ns: int = 0
    child_ns: int = 0
    durations: Durations = field(default_factory=Durations, compare=False)
    counters: Mapping[str, int] = field(default_factory=dict)
    reports: Mapping[str, Report] = field(default_factory=dict)

    def since(self, earlier: StageCounts) -> StageCounts:
        """What was counted after an earlier look."""
        numbers = (*COUNTERS, "coreless_ns", "child_ns")
        less = {name: max(0, getattr(self, name) - getattr(earlier, name)) for name in numbers}
        counters = {name: n - earlier.counters.get(name, 0) for name, n in self.counters.items()}
        return replace(self, **less, durations=self.durations.since(earlier.durations), counters=counters)


@dataclass(frozen=True)
class ChannelLook:
    """One queue at one moment."""

    capacity: int
    depth: int
    nbytes: int


@dataclass(frozen=True)
class Measured:
    """All counters of a loader at one moment, or what they grew by in an interval.

    Attributes:
        totals: while passes ran, as ``engine.pass_totals`` has them.
        stages: by name, those that run.
        workers: of each, now.
        channels: the queue into input ``index`` of ``consumer``; ``("", 0)`` is read by the training loop.
        waits: of the training loop for each chunk.
        process_ns: how long this process and its workers' ran on a core.
        cores: how many it may use.
        memory: bytes that chunks hold now, the most that they held, and the limit.
        identity: of the loader.
    """

    totals: Totals
    stages: Mapping[str, StageCounts]
    workers: Mapping[str, int]
    channels: Mapping[tuple[str, int], ChannelLook]
    waits: Durations
    items: int
    samples: int
    passes: int
    process_ns: int
    cores: float
    memory: tuple[int, int, int]
    identity: object = None

    def since(self, earlier: Measured) -> Measured:
        """What was counted after an earlier look at the same loader."""
        totals = self.totals.copy()
        totals.subtract(earlier.totals)
        stages = {
            name: counts.since(earlier.stages[name]) if name in earlier.stages else counts
            for name, counts in self.stages.items()
        }
        return replace(
            self,
            totals=totals,
            stages=stages,
            waits=self.waits.since(earlier.waits),
            items=self.items - earlier.items,
            samples=self.samples - earlier.samples,
            passes=self.passes - earlier.passes,
            process_ns=self.process_ns - earlier.process_ns,
        )


def measure(loader: Loader, runtime: Runtime) -> Measured:
    """Look at all counters of a loader that has started; any thread may."""
    progress = loader._progress
    totals = runtime.pass_totals.totals()
    gauges = runtime.pass_totals.gauges()
    stages = {
        stage.name: _stage(runtime, stage.name, gauges)
        for stage in loader.plan.stages.values()
        if stage.bypassed is None or stage.name in runtime.meters
    }
    return Measured(
        totals=totals,
        stages=stages,
        workers={name: runtime.staffing.workers(name) for name in stages},
        channels={
            edge: ChannelLook(stats.capacity, stats.depth, stats.nbytes)
            for edge, stats in gauges.channels.items()
        },
        waits=progress.waits.durations(),
        items=progress.items,
        samples=progress.samples,
        passes=runtime.pass_totals.passes,
        process_ns=totals["process",] + sum(counts.child_ns for counts in stages.values()),
        cores=cores(),
        memory=(*gauges.memory, runtime.memory_limit),
        identity=runtime.pass_totals.identity,
    )


def _stage(runtime: Runtime, name: str, gauges: Gauges) -> StageCounts:
    meters = runtime.meters.get(name, [])
    durations = Durations()
    for meter in meters:
        durations.merge(meter.watch.durations())
    sums: dict[str, Any] = {each: sum(getattr(meter, each) for meter in meters) for each in COUNTERS}
    return StageCounts(
        **sums,
        coreless_ns=gauges.coreless.get(name, 0),
        child_ns=gauges.processes.get(name, 0),
        durations=durations,
        counters=dict(runtime.counters.get(name, {})),
        reports={key: made for key, made in runtime.shared(name).items() if isinstance(made, Report)},
    )
