"""Measurements: each one declared once, and carried from a worker's counter to every view.

A measurement of a stage is a field of :class:`StageProfile`: its meaning, its unit, how it is counted or computed, and
its title in each view. A field without a function to compute it is counted, if ``counts.COUNTERS`` has its name. All
counts travel as ``Totals`` inside a ``Measured``, which is all that profiles and the tuner are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from pipegraph.backends import THREAD, StageBackend
from pipegraph.counts import Edge, QueueLook, Totals, growth
from pipegraph.durations import Durations
from pipegraph.units import format_bytes, format_count, format_duration, format_rate, format_share

FORMATS: Mapping[str, Callable[[Any], str]] = {
    "": format_count,
    "seconds": format_duration,
    "ratio": format_share,
    "per second": format_rate,
    "bytes": lambda nbytes: format_bytes(nbytes) if nbytes else "-",
    "bytes per second": lambda nbytes: format_bytes(nbytes) if nbytes else "-",
    "text": str,
}


@dataclass(frozen=True, eq=False, repr=False)
class Measurement:
    """What is declared of one field of a record.

    Attributes:
        about: what it is, for documentation and OpenMetrics.
        unit: one of :data:`FORMATS`.
        views: ``"TITLE: VIEWS"``, of ``table``, ``remark`` (below the table), ``live``, ``page`` (the
            report) and ``log`` (numbers for loggers).
        of: computes it from a stage's counts.
        log: its name for loggers, if not that of the field.
        metric: its name in OpenMetrics: counters end in ``_total``; ``name 0.5`` is a quantile of a summary.
    """

    about: str
    unit: str = ""
    views: str = ""
    of: Callable[[StageCounts], Any] | None = None
    log: str = ""
    metric: str = ""

    def text(self, value: Any) -> str:
        """A value as every view for people writes it."""
        return "-" if value is None else FORMATS[self.unit](value)

    def title(self, view: str, name: str) -> str:
        """Of this field in a view; "" where it is not shown."""
        title, _, views = self.views.partition(": ")
        if view == "metric" or view not in views.split():
            return self.metric if view == "metric" else ""
        return self.log or name if view == "log" else title


def measurement(*declared: Any, default: Any = 0, **more: Any) -> Any:
    """A field of a frozen dataclass, with what :class:`Measurement` says of it. A default may be a function."""
    made = {"default_factory" if callable(default) else "default": default}
    return field(**made, metadata={"measurement": Measurement(*declared, **more)})


Record = TypeVar("Record", bound=type)


def documented(record: Record) -> Record:
    """Add what was declared of its fields to a dataclass's docstring."""
    lines = [f"    {name}: {each.about}" for name, each in measurements(record).items()]
    record.__doc__ = "\n".join([record.__doc__ or "", "", "Attributes:", *lines])
    return record


def measurements(record: type) -> dict[str, Measurement]:
    """What is declared of a record's fields, by their names."""
    return {each.name: each.metadata["measurement"] for each in fields(record) if each.metadata}


def in_view(record: type, view: str) -> list[tuple[str, Measurement, str]]:
    """``(field, measurement, title)`` of all that a view shows, in order."""
    titles = [(name, each, each.title(view, name)) for name, each in measurements(record).items()]
    return [each for each in titles if each[2]]


# -- of a stage --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class StageCounts:
    """The counts of one stage, as its measurements are computed from them.

    Attributes:
        life: since the loader was made.
        passes: while passes ran.
        worked_ns: of its workers, busy or not, while passes ran.
        starved_ns, blocked_ns: that they waited for input, and for room in the output.
        pieces: that it worked on: its calls, or a source's items.
    """

    life: Mapping[str, int]
    passes: Mapping[str, int]
    durations: Durations
    elapsed_ns: int = 1
    worked_ns: int = 1
    starved_ns: float = 0.0
    blocked_ns: float = 0.0
    pieces: int = 0

    def share(self, ns: float) -> float:
        """Of its workers' time. Counters are read while workers write them, so it may come out a little above 1."""
        return min(1.0, ns / self.worked_ns)

    def rate(self, name: str) -> float:
        """Per second of passes, in which all is asked for that was made before or between them."""
        return self.life[name] * 1e9 / self.elapsed_ns


@documented
@dataclass(frozen=True)
class StageProfile:
    """One stage since the loader was made.

    Shares are of the time that passes ran, averaged over the stage's workers; what is left over is
    overhead and, for a source, having read everything.
    """

    workers: int = measurement(
        "how many it has; 0 for one that the plan left out, or whose work another stage's workers do.",
        views="workers: table live log",
        metric="stage_workers",
    )
    backend: StageBackend = measurement("where its workers run.", "text", default=THREAD)
    items: int = measurement("chunks that it sent.", views="items: table page", metric="stage_items_total")
    samples: int = measurement("samples in them.", metric="stage_samples_total")
    nbytes: int = measurement(
        "bytes of arrays, tensors and encoded data that it made.",
        "bytes",
        metric="stage_made_bytes_total",
    )
    rate: float = measurement(
        "items per second while passes ran.",
        "per second",
        "items/s: table live page log",
        lambda stage: stage.rate("items"),
        log="items_per_s",
    )
    bytes_per_s: float = measurement(
        "bytes that it made per second.",
        "bytes per second",
        "bytes/s: table",
        lambda stage: stage.rate("items") * stage.life["nbytes"] / max(1, stage.life["items"]),
    )
    service_mean_s: float = measurement(
        "mean seconds of work for one item in (for a source: out).",
        "seconds",
        "per item: table page",
        lambda stage: stage.life["busy_ns"] / 1e9 / max(1, stage.pieces),
    )
    service_p50_s: float = measurement(
        "seconds that one piece of work (an item, a row of a batch, a bundle of rows) took, within 1 %: the median.",
        "seconds",
        "p50: page log",
        lambda stage: stage.durations.quantile_s(0.5),
        metric="stage_service_seconds 0.5",
    )
    service_p90_s: float = measurement(
        "the same: 90 % took no longer.",
        "seconds",
        "p90: page",
        lambda stage: stage.durations.quantile_s(0.9),
        metric="stage_service_seconds 0.9",
    )
    service_p99_s: float = measurement(
        "the same: 99 % took no longer.",
        "seconds",
        "p99: page",
        lambda stage: stage.durations.quantile_s(0.99),
        metric="stage_service_seconds 0.99",
    )
    busy: float = measurement(
        "share 0..1 that its workers worked, or waited inside their work: for data, a device, the GIL. Work that is "
        "under way counts, so that a stage that hangs is busy.",
        "ratio",
        "busy: table live page log",
        lambda stage: stage.share(stage.passes["busy_ns"]),
        metric="stage_busy_ratio",
    )
    running: float | None = measurement(
        "share 0..1 that its workers' threads and processes ran on a core; None for an inline stage, which has none.",
        "ratio",
        "on a core: page",
        lambda stage: stage.share(stage.passes["cpu_ns"] + stage.life["child_ns"]),
        default=None,
    )
    coreless: float = measurement(
        "share 0..1 that they were ready to run and had no core.",
        "ratio",
        of=lambda stage: stage.share(stage.life["coreless_ns"]),
    )
    starved: float = measurement(
        "share 0..1 that they waited because their input was empty.",
        "ratio",
        "starved: table page log",
        lambda stage: stage.share(stage.starved_ns),
        metric="stage_starved_ratio",
    )
    blocked: float = measurement(
        "share 0..1 that they waited for room in the output queue.",
        "ratio",
        "blocked: table page log",
        lambda stage: stage.share(stage.blocked_ns),
        metric="stage_blocked_ratio",
    )
    failed: int = measurement(
        "items (on batches, samples) that failed, whatever the policy then did.",
        views="failed: remark page",
        metric="stage_failed_total",
    )
    retried: int = measurement(
        "tries after the first.", views="retries: remark", metric="stage_retried_total"
    )
    dropped: int = measurement(
        "items that it took and sent nothing for (filtered, skipped, or read by nobody).",
        views="dropped: remark",
        metric="stage_dropped_total",
    )
    grown_to: int | None = measurement(
        "capacity of its output queue if the graph stalled and it was enlarged, else None.", default=None
    )
    counters: Mapping[str, int] = measurement("what the operator counts itself.", "text", default=dict)
    within: str | None = measurement("the stage that does its work, or None.", "text", default=None)
    drawing: float = measurement(
        "share 0..1 of the time of passes that its sampler drew, one index after the other whatever its workers.",
        "ratio",
        of=lambda stage: min(1.0, stage.passes["drawing"] / stage.elapsed_ns),
    )
    fixed: str | None = measurement(
        "why it has no use of more workers; None if it may have.", "text", default=None
    )
    remedy: str = measurement("what helps such a stage instead.", "text", default="")
    pinned: bool = measurement("whether its output is in pinned memory.", "text", default=False)

    @property
    def works(self) -> bool:
        """Whether it runs, by workers of its own or by another stage's."""
        return bool(self.workers or self.within)


@dataclass(frozen=True, eq=False, repr=False)
class Measured:
    """All that a loader has counted so far, or in an interval.

    Attributes:
        life: since the loader was made: of each stage its counters, ``("coreless_ns", stage)`` (its threads and
            processes were ready to run and had no core) and ``("child_ns", stage)`` (its processes ran on one); of the
            training loop ``("items", "")``, ``("samples", "")`` and ``("passes", "")``.
        passes: while passes ran; also ``("elapsed", "")``, ``("process", "")`` (this process on a core),
            ``("worked", stage)`` (of its workers, busy or not), ``("drawing", stage)`` (its sampler drew),
            and ``("put", *edge)``, ``("get", *edge)``: waits summed over threads.
        durations: of each stage's pieces of work, and under ``""`` of the training loop's waits.
        workers: of each stage that runs, now.
        queues: now.
        counters: what operators count themselves, by stage.
        grown: capacities of queues that had to grow.
        cores: how many the loader may use.
        memory: bytes that chunks hold now, the most that they held, and the limit.
        process_bytes: the most memory of its own that a worker process has now.
        in_pass: the epoch of the latest pass, and how many chunks it has delivered.
        identity: of the loader; None before its first pass.
    """

    life: Totals = field(default_factory=Counter)
    passes: Totals = field(default_factory=Counter)
    durations: Mapping[str, Durations] = field(default_factory=dict)
    workers: Mapping[str, int] = field(default_factory=dict)
    queues: Mapping[Edge, QueueLook] = field(default_factory=dict)
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    grown: Mapping[str, int] = field(default_factory=dict)
    cores: float = 0.0
    memory: tuple[int, int, int] = (0, 0, 0)
    process_bytes: int = 0
    first_batch_s: float | None = None
    in_pass: tuple[int, int] = (0, 0)
    identity: object = None

    def since(self, earlier: Measured) -> Measured:
        """What was counted after an earlier look at the same loader."""
        return replace(
            self,
            life=growth(self.life, earlier.life),
            passes=growth(self.passes, earlier.passes),
            durations={
                name: found.since(earlier.durations[name]) if name in earlier.durations else found
                for name, found in self.durations.items()
            },
            queues={
                edge: look._replace(gained=look.depth - earlier.queues[edge].depth)
                if edge in earlier.queues
                else look
                for edge, look in self.queues.items()
            },
            counters={
                stage: {name: n - earlier.counters.get(stage, {}).get(name, 0) for name, n in found.items()}
                for stage, found in self.counters.items()
            },
        )

    def of(self, stage: str) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """``life`` and ``passes`` of one stage, by name."""
        return _of(self.life, stage), _of(self.passes, stage)


def _of(totals: Totals, stage: str) -> Counter[str]:
    return Counter({key[0]: n for key, n in totals.items() if key[1:] == (stage,)})
