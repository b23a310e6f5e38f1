"""``Profile`` and ``StageProfile``: frozen values, as ``loader.profile()`` returns them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from pipegraph.engine.stage.budgets import Quarantined

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
        busy: share 0..1 that its workers worked, or waited inside their work: for data, a device, the interpreter lock.
        running: share 0..1 that its workers' threads ran on a core; None for an inline stage, which has no threads.
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
    busy: float = 0.0
    running: float | None = None
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


@dataclass(frozen=True)
class Profile:
    """A look at a loader; ``str()`` is a table of at most 100 columns.

    Attributes:
        stages: by name, from source to sink, stages that were left out included.
        bottleneck: the stage that sets the pace, or ``"consumer"`` where the training loop does, or where passes ran
            for less than :data:`MIN_S`.
        stall_s: seconds that the training loop has waited for data, in all.
        samples_per_s: samples delivered per second while passes ran.
        quarantined: what failed and was left out or replaced, of the whole run.
        graph: the graph's name.
        elapsed_s: seconds that passes ran.
        passes: how many have begun.
        items: chunks delivered.
        samples: samples delivered.
        lock: whether the bottleneck is one because it holds the interpreter lock, for which the others wait.
        wake_s: mean seconds from a thread's being woken to its running: for a core, or for the interpreter lock.
        first_batch_s: seconds from the first ``iter()`` to the first chunk; None before it.
    """

    stages: Mapping[str, StageProfile]
    bottleneck: str
    stall_s: float
    samples_per_s: float
    quarantined: tuple[Quarantined, ...]
    graph: str = "pipeline"
    elapsed_s: float = 0.0
    passes: int = 0
    items: int = 0
    samples: int = 0
    first_batch_s: float | None = None
    lock: bool = False
    wake_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", MappingProxyType(dict(self.stages)))

    def __reduce__(self) -> tuple[Any, ...]:
        # To other ranks; a read-only view cannot be pickled.
        values = (getattr(self, name) for name in self.__dataclass_fields__)
        return type(self), tuple(dict(v) if isinstance(v, MappingProxyType) else v for v in values)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["stages"] = {name: asdict(stage) for name, stage in self.stages.items()}
        plain["quarantined"] = [asdict(entry) for entry in self.quarantined]
        return plain

    def to_json(self, indent: int | None = None) -> str:
        """:meth:`to_dict` as JSON; keys of samples that JSON does not know become text."""
        return json.dumps(self.to_dict(), indent=indent, default=str)

    @property
    def conclusion(self) -> str:
        """The bottleneck in a sentence, with its evidence."""
        from .table import conclude

        return conclude(self)

    def __str__(self) -> str:
        from .table import render

        return render(self)
