"""Counters of a loader, summed over its passes.

Workers' meters live as long as the loader, channels as long as a run, and the training loop may pause
between passes. So each pass is an *interval*: the growth of the counters during it is added to the
total, and pauses between passes do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns, process_time_ns
from typing import Any

from pipegraph import concurrency
from pipegraph.engine.channel import ChannelStats
from pipegraph.engine.loader_context import LoaderContext
from pipegraph.engine.run import Run
from pipegraph.engine.staffing import Staffing
from pipegraph.machine import scheduled

Totals = Counter[tuple[Any, ...]]
"""Nanoseconds or numbers under ``("elapsed",)``, ``("busy", stage)``, ``("items", stage)``,
``("cpu", stage)`` (of its threads), ``("worked", stage)`` (of its workers, busy or not),
``("process",)`` (of all threads of this process), ``("late", stage)`` (between the
wake-up of one of its threads and that thread's next step) and ``("wakes", stage)``,
``("memory", stage)`` (waits for room under ``memory_limit``), and for the edge into input ``index`` of
``consumer`` (``""`` is the training loop) ``("put", consumer, index)`` and ``("get", consumer, index)``:
waits summed over threads."""


class Interval:
    """The interval of one pass, with the counters at its start."""

    def __init__(self, run: Run, start: Totals) -> None:
        self.run = run
        self.start = start
        self.left_ns: int | None = None

    def leave(self) -> None:
        """The pass was left early. Takes no lock: the garbage collector may call this anywhere."""
        self.left_ns = perf_counter_ns()


@dataclass
class Gauges:
    """Values at one moment, as opposed to counters; after a run, those at its end.

    Attributes:
        channels: by ``(consumer, input index)``.
        memory: bytes that chunks hold, and the peak of these.
        coreless: by stage, nanoseconds that its threads and processes were ready to run without a core.
        processes: by stage with worker processes, nanoseconds that these ran on a core.
    """

    channels: dict[tuple[str, int], ChannelStats] = field(default_factory=dict)
    memory: tuple[int, int] = (0, 0)
    coreless: dict[str, int] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)


class PassTotals:
    """The totals of one runtime. Thread-safe.

    Args:
        remote_totals: returns the counters of a run's stages in other processes.
    """

    def __init__(
        self, loader: LoaderContext, staffing: Staffing, remote_totals: Callable[[Run], Totals]
    ) -> None:
        self._loader = loader
        self._staffing = staffing
        self._remote_totals = remote_totals
        self._lock = concurrency.Lock()
        self._total: Totals = Counter()
        self._interval: Interval | None = None
        self._gauges = Gauges()
        self.passes = 0
        self.identity = object()
        """Distinguishes the counters of one loader from those of another."""

    def begin(self, run: Run) -> Interval:
        """Begin a pass over ``run``; ends the previous one."""
        self.end()
        with self._lock:
            self._interval = Interval(run, self.look(run, perf_counter_ns()))
            self.passes += 1
            return self._interval

    def end(self) -> None:
        """End the current pass, if there is one: add its interval to the total."""
        with self._lock:
            if self._interval is not None:
                self._look_at_gauges()
            # At once: interrupted between the two, the interval would count twice.
            self._total, self._interval = self._so_far(), None

    def totals(self) -> Totals:
        """The sum of all intervals, the running one included."""
        with self._lock:
            return self._so_far()

    def gauges(self) -> Gauges:
        """Queue depths, memory and worker processes now."""
        with self._lock:
            if self._interval is not None:
                self._look_at_gauges()
            return self._gauges

    def _look_at_gauges(self) -> None:
        assert self._interval is not None
        run, loader = self._interval.run, self._loader
        coreless = {name: sum(meter.waited_ns() for meter in each) for name, each in loader.meters.items()}
        processes = {}
        for name, workers in loader.workers.items():
            if loader.plan.stages[name].backend.measurable:
                pids = [worker.operator.pid for worker in workers]
                found = [scheduled(pid) or (0, 0) for pid in pids if pid is not None]
                processes[name] = sum(ran for ran, _ in found)
                coreless[name] += sum(waited for _, waited in found)
        channels = {edge: channel.stats() for edge, channel in run.channels.items()}
        self._gauges = Gauges(channels, (run.account.used, run.account.peak), coreless, processes)

    def _so_far(self) -> Totals:
        interval = self._interval
        if interval is None:
            return self._total
        return self._total + (self.look(interval.run, interval.left_ns or perf_counter_ns()) - interval.start)

    def look(self, run: Run, now_ns: int) -> Totals:
        """All counters of a run now."""
        remote = self._remote_totals(run)
        found: Totals = Counter({("elapsed",): now_ns})
        for stage, meters in self._loader.meters.items():
            found["busy", stage] = sum(meter.busy_ns for meter in meters)
            found["items", stage] = sum(meter.items for meter in meters)
            found["worked", stage] = self._staffing.worked_ns(stage, now_ns)
            found["cpu", stage] = sum(meter.cpu_ns() for meter in meters)
            found["wakes", stage] = sum(meter.wakes for meter in meters)
            found["late", stage] = sum(meter.late_ns for meter in meters)
        found["process",] = process_time_ns()
        for account in run.account.stages:
            found["memory", account.name] = account.wait_ns
        for (consumer, index), channel in run.channels.items():
            stats = channel.stats(now_ns)
            found["put", consumer, index] = stats.put_wait_ns
            found["get", consumer, index] = stats.get_wait_ns
        for key, value in remote.items():
            # Puts into the first queue here are the remote stage's, not those of the receiving loop.
            found[key] = value if key[0] == "put" else found[key] + value
        return found
