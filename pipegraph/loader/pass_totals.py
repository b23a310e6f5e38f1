"""What a loader has counted, over its life and over its passes.

Workers' meters live as long as the loader, channels as long as a run, and the training loop may pause
between passes. So each pass is an *interval*: the growth of the counters during it is added to the
total, and pauses between passes do not count.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from typing import TYPE_CHECKING

from pipegraph import concurrency
from pipegraph.counts import COUNTERS, Edge, QueueLook, Totals, growth
from pipegraph.durations import Durations
from pipegraph.engine.loader_context import LoaderContext
from pipegraph.engine.run import Run
from pipegraph.machine import cores, scheduled

if TYPE_CHECKING:
    from pipegraph.measurements import Measured


class Interval:
    """The interval of one pass, with the counters at its start."""

    def __init__(self, run: Run, start: Totals) -> None:
        self.run = run
        self.start = start
        self.left_ns: int | None = None

    def leave(self) -> None:
        """The pass was left early. Takes no lock: the garbage collector may call this anywhere."""
        self.left_ns = perf_counter_ns()


class PassTotals:
    """The totals of one crew. Thread-safe."""

    def __init__(self, loader: LoaderContext) -> None:
        self._loader = loader
        self._lock = concurrency.Lock()
        self._total: Totals = Counter()
        self._interval: Interval | None = None
        self._passes = 0
        # As they are now, and after a run as they were at its end.
        self._queues: dict[Edge, QueueLook] = {}
        self._memory = (0, 0)
        self._scheduled: Totals = Counter()
        self._process_bytes = 0
        self.identity = object()
        """Distinguishes the counters of one loader from those of another."""

    def begin(self, run: Run) -> Interval:
        """Begin a pass over ``run``; ends the previous one."""
        self.end()
        with self._lock:
            self._interval = Interval(run, self._look(run, perf_counter_ns()))
            self._passes += 1
            return self._interval

    def end(self) -> None:
        """End the current pass, if there is one: add its interval to the total."""
        with self._lock:
            if self._interval is not None:
                self._look_at_gauges(self._interval.run)
            # At once: interrupted between the two, the interval would count twice.
            self._total, self._interval = self._so_far(), None

    def measure(
        self,
        items: int,
        samples: int,
        waits: Durations,
        first_batch_s: float | None,
        in_pass: tuple[int, int],
    ) -> Measured:
        """All that was counted so far; the arguments are of the training loop."""
        from pipegraph.measurements import Measured

        loader = self._loader
        with self._lock:
            passes = self._so_far()
            if self._interval is not None:
                self._look_at_gauges(self._interval.run)
            life = self._stage_totals(perf_counter_ns())
            durations = {"": waits}
            for name, meters in list(loader.meters.items()):
                durations[name] = Durations()
                for meter in meters:
                    durations[name].merge(meter.watch.durations())
            of_training = {("items", ""): items, ("samples", ""): samples, ("passes", ""): self._passes}
            return Measured(
                life=Counter({**life, **self._scheduled, **of_training}),
                passes=passes,
                durations=durations,
                counters={name: dict(found) for name, found in list(loader.counters.items())},
                workers={name: loader.taking_part(name) for name in loader.meters},
                grown=dict(loader.grown),
                queues=self._queues,
                cores=cores(),
                memory=(*self._memory, loader.memory_limit),
                process_bytes=self._process_bytes,
                first_batch_s=first_batch_s,
                in_pass=in_pass,
                identity=self.identity,
            )

    def _look(self, run: Run, now_ns: int) -> Totals:
        """All counters of a run now."""
        found = self._stage_totals(now_ns)
        found["elapsed", ""] = now_ns
        found["process", ""] = process_time_ns()
        for stage in list(self._loader.meters):
            found["busy_ns", stage] += found["in_work_ns", stage]  # a hanging stage is busy
            found["worked", stage] = self._loader.worked_ns(stage, now_ns)
        for name, running in run.stages.items():
            since, drawn = running.draws_since_ns, running.drawing_ns
            found["drawing", name] = drawn + (max(0, now_ns - since) if since else 0)
        for edge, channel in run.channels.items():
            stats = channel.stats(now_ns)
            found["put", *edge] = stats.put_wait_ns
            found["get", *edge] = stats.get_wait_ns
        return found

    def _stage_totals(self, now_ns: int) -> Totals:
        found: Totals = Counter()
        for stage, meters in list(self._loader.meters.items()):
            # First: what ends meanwhile is then one piece behind, and not counted twice.
            found["in_work_ns", stage] = sum(meter.in_work_ns(now_ns) for meter in meters)
            for name in COUNTERS:
                found[name, stage] = sum(getattr(meter, name) for meter in meters)
            found["cpu_ns", stage] = sum(meter.cpu_ns() for meter in meters)
        return found

    def _look_at_gauges(self, run: Run) -> None:
        loader = self._loader
        found: Totals = Counter()
        for name, meters in list(loader.meters.items()):
            found["coreless_ns", name] = sum(meter.coreless_ns() for meter in meters)
        process_bytes = 0
        for name, workers in loader.workers.items():
            if loader.plan.stages[name].backend.measurable:
                for pid in [worker.operator.pid for worker in workers if worker.ready]:
                    ran, waited = (pid and scheduled(pid)) or (0, 0)
                    found["child_ns", name] += ran
                    found["coreless_ns", name] += waited
                    process_bytes = max(process_bytes, _own_bytes(pid))
        stats = ((edge, channel.stats()) for edge, channel in run.channels.items())
        self._queues = {
            edge: QueueLook(each.capacity, each.depth, each.nbytes, each.depth) for edge, each in stats
        }
        self._memory = run.account.used, run.account.peak
        self._scheduled, self._process_bytes = found, process_bytes

    def _so_far(self) -> Totals:
        interval = self._interval
        if interval is None:
            return self._total
        found = growth(self._look(interval.run, interval.left_ns or perf_counter_ns()), interval.start)
        found.update(self._total)
        return found


def _own_bytes(pid: int | None) -> int:
    """Memory of a process's own; 0 if not known."""
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
        return (int(resident) - int(shared)) * 4096
    except (OSError, ValueError):
        return 0
