"""``Profile`` and ``StageProfile``: frozen values, as ``loader.profile()`` returns them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipegraph.backends import THREAD, StageBackend
from pipegraph.engine.stage.budgets import Quarantined

from .bottleneck import STARTING, Cause

if TYPE_CHECKING:
    from .measured import Measured
    from .what_if import Prediction

MIN_S = 0.05
"""Passes shorter than this, shown as 0.0 s, measure start-up rather than the bottleneck."""


@dataclass(frozen=True)
class StageProfile:
    """One stage since the loader was made.

    Shares are of the time that passes ran, averaged over the stage's workers; what is left over is
    overhead and, for a source, having read everything.

    Attributes:
        items: chunks that it sent.
        samples: samples in them.
        nbytes: bytes of arrays, tensors and encoded data that it made.
        rate: items per second while passes ran.
        service_mean_s: mean seconds of work for one item in (for a source: out).
        service_p50_s, service_p90_s, service_p99_s: percentiles of the seconds that one piece of work took, within 1 %:
            an item, a row of a batch where workers share batches, a bundle where rows travel in bundles.
        busy: share 0..1 that its workers worked, or waited inside their work: for data, a device, the interpreter lock.
        running: share 0..1 that its workers' threads and processes ran on a core; None for an inline stage, which has
            none.
        coreless: share 0..1 that they were ready to run and had no core.
        backend: where its workers run.
        starved: share 0..1 that they waited because their input was empty.
        blocked: share 0..1 that they waited for room: in the output queue, or under ``memory_limit``.
        failed: items (on batches, samples) that failed, whatever the policy then did.
        retried: tries after the first.
        workers: how many; 0 for a stage that the plan left out.
        dropped: items that it took and sent nothing for (filtered, skipped, or read by nobody).
        memory: the part of ``blocked`` that was spent waiting for room under ``memory_limit``.
        grown_to: capacity of its output queue if the graph stood still and it was enlarged, else None.
        counters: what the operator counts itself, by name.
        reports: its reports beside counters: name -> JSON (see ``profile.reports``).
        remarks: the same for people, as lines of the table.
        within: the stage that does its work, and in whose figures that is, or None.
    """

    items: int = 0
    samples: int = 0
    nbytes: int = 0
    rate: float = 0.0
    service_mean_s: float = 0.0
    service_p50_s: float = 0.0
    service_p90_s: float = 0.0
    service_p99_s: float = 0.0
    busy: float = 0.0
    running: float | None = None
    coreless: float = 0.0
    backend: StageBackend = THREAD
    starved: float = 0.0
    blocked: float = 0.0
    failed: int = 0
    retried: int = 0
    workers: int = 0
    dropped: int = 0
    memory: float = 0.0
    grown_to: int | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    reports: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    within: str | None = None


def run_of(stages: Mapping[str, StageProfile], name: str) -> list[str]:
    """The stages whose work a stage's workers do: its own first. Empty for the training loop."""
    return [each for each, stage in stages.items() if name in (each, stage.within)]


def run_busy(stages: Mapping[str, StageProfile], name: str) -> float:
    """Share 0..1 of its workers' time that they worked, for any stage of the run."""
    return min(1.0, sum(stages[each].busy for each in run_of(stages, name)))


@dataclass(frozen=True)
class ChannelProfile:
    """One queue between two stages.

    Attributes:
        producer, consumer: stages; ``"consumer"`` is the training loop.
        capacity: items that it may hold.
        depth: items that it holds now, or held when the last pass ended.
        nbytes: bytes of these.
        put_wait_s, get_wait_s: seconds that workers waited for room in it, and for items of it, summed over workers.
    """

    producer: str
    consumer: str
    capacity: int = 0
    depth: int = 0
    nbytes: int = 0
    put_wait_s: float = 0.0
    get_wait_s: float = 0.0


@dataclass(frozen=True, repr=False)
class Profile:
    """A look at a loader; ``str()`` is a table of at most 100 columns.

    Attributes:
        stages: by name, from source to sink, stages that were left out included.
        bottleneck: the stage that sets the pace, or ``"consumer"`` where the training loop does, or where passes ran
            for less than :data:`MIN_S`.
        stall_s: seconds that the training loop has waited for data, in all.
        samples_per_s: samples delivered per second while passes ran.
        quarantined: what failed and was left out or replaced: the last 1,000 of the whole run.
        quarantined_count: how many there were in all.
        graph: the graph's name.
        elapsed_s: seconds that passes ran.
        passes: how many have begun.
        items: chunks delivered.
        samples: samples delivered.
        cause: why the bottleneck is one: ``"consumer"`` (training sets the pace), ``"stage"`` (its own work),
            ``"storage"`` (reading), ``"cores"`` (all are in use), ``"lock"`` (it holds the interpreter lock, for which
            others wait), ``"memory"`` (it waits for room under ``memory_limit``), or ``"unknown"``.
        channels: the queues, from source to sink.
        step_s: mean seconds that the training loop took for a step itself, without waiting.
        wait_p50_s, wait_p90_s, wait_p99_s: percentiles of the seconds that it waited for a chunk.
        waits: all of them as ``(seconds, how many)``, in ascending order, within 1 %.
        cores_used: cores that this process and its workers' kept running on average.
        cores: cores that they may use.
        memory_bytes, memory_peak_bytes, memory_limit: what chunks hold now, the most in this run, and their limit.
        pinned_bytes: pinned memory that stages have allocated.
        wake_s: mean seconds from a thread's wake-up to its running, with a free core: waits for the interpreter lock.
        first_batch_s: seconds from the first ``iter()`` to the first chunk; None before it.
    """

    stages: Mapping[str, StageProfile]
    bottleneck: str
    stall_s: float
    samples_per_s: float
    quarantined: tuple[Quarantined, ...]
    quarantined_count: int = 0
    graph: str = "pipeline"
    elapsed_s: float = 0.0
    passes: int = 0
    items: int = 0
    samples: int = 0
    first_batch_s: float | None = None
    cause: Cause = "unknown"
    channels: tuple[ChannelProfile, ...] = ()
    step_s: float = 0.0
    wait_p50_s: float = 0.0
    wait_p90_s: float = 0.0
    wait_p99_s: float = 0.0
    waits: tuple[tuple[float, int], ...] = ()
    cores_used: float = 0.0
    cores: float = 0.0
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_limit: int = 0
    pinned_bytes: int = 0
    wake_s: float = 0.0
    measured: Measured | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", MappingProxyType(dict(self.stages)))

    def __reduce__(self) -> tuple[Any, ...]:
        # To other ranks; a read-only view cannot be pickled, and what stages report themselves need not be.
        values = (getattr(self, name) for name in self.__dataclass_fields__ if name != "measured")
        return type(self), tuple(dict(v) if isinstance(v, MappingProxyType) else v for v in values)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; keys of samples as they came."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "measured"}
        plain["stages"] = {name: asdict(stage) for name, stage in self.stages.items()}
        plain["channels"] = [asdict(channel) for channel in self.channels]
        plain["quarantined"] = [asdict(entry) for entry in self.quarantined]
        return plain

    def to_json(self, indent: int | None = None) -> str:
        """:meth:`to_dict` as JSON; keys of samples that JSON does not know become text."""
        return json.dumps(self.to_dict(), indent=indent, default=str)

    def to_pandas(self) -> Any:
        """The stages as a ``pandas.DataFrame`` with a row per stage; needs pandas."""
        import pandas

        return pandas.DataFrame.from_dict(self.to_dict()["stages"], orient="index")

    def scalars(self) -> dict[str, float]:
        """Plain numbers under short names, as loggers such as TensorBoard and W&B take them."""
        from .openmetrics import scalars

        return scalars(self)

    def what_if(
        self, stage: str, *, workers: int | None = None, cost: float = 1.0, cached: bool = False
    ) -> Prediction:
        """The throughput to expect if one stage were changed and all else stayed.

        Args:
            stage: a stage that runs, or ``"consumer"`` for the training loop.
            workers: how many it would have; by default as many as now.
            cost: how many times as long its work on an item would take, such as 0.5.
            cached: whether its output would come from memory, so that neither it nor the stages that feed only it work.

        Raises:
            GraphError: there is no such stage, or a number is out of range.
        """
        from .what_if import predict

        return predict(self, stage, workers=workers, cost=cost, cached=cached)

    @property
    def lock(self) -> bool:
        """Whether the bottleneck is one because it holds the interpreter lock, for which the others wait."""
        return self.cause == "lock"

    @property
    def conclusive(self) -> bool:
        """Whether passes ran long enough for ``bottleneck`` to mean anything."""
        return self.items > 0 and self.elapsed_s >= MIN_S

    @property
    def conclusion(self) -> str:
        """The bottleneck in a sentence, with its evidence."""
        from .table import conclude

        return conclude(self)

    def __repr__(self) -> str:
        holds = ""
        if self.conclusive:
            if self.bottleneck != "consumer":
                holds = f", {self.bottleneck!r} holds back"
            elif self.stall_s <= STARTING * self.elapsed_s:
                holds = ", training sets the pace"
        return (
            f"<Profile {self.graph}: {self.samples_per_s:,.0f} samples/s, waited {self.stall_s:.2f} s{holds}>"
        )

    def _repr_html_(self) -> str:
        from .table import render_html

        return render_html(self)

    def __str__(self) -> str:
        from .table import render

        return render(self)
