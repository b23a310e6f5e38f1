"""What a loader has measured, as one record: all that profiles and the tuner are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipegraph.durations import Durations

Totals = Counter[tuple[Any, ...]]
"""Numbers by name and place: ``("items", stage)``, ``("get", consumer, index)`` for the queue into an input. The
training loop is the stage ``""``."""

COUNTERS = tuple("busy_ns calls wakes late_ns items samples nbytes failed retried dropped".split())
"""The counters of one worker, attributes of its ``Meter``: nanoseconds of work, calls, times that its thread resumed
after a wait and nanoseconds from its being woken to that, and those that ``StageProfile`` has fields for."""

Edge = tuple[str, int]
"""The queue into input ``index`` of a stage; ``("", 0)`` is read by the training loop."""


@dataclass(frozen=True)
class QueueLook:
    """One queue at one moment; ``gained``: by how many items it is longer than when counting began."""

    capacity: int
    depth: int
    nbytes: int
    gained: int


@dataclass(frozen=True)
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
                edge: replace(look, gained=look.depth - earlier.queues[edge].depth)
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


def growth(now: Totals, earlier: Totals) -> Totals:
    """What was counted since an earlier look."""
    return Counter({key: max(0, n - earlier[key]) for key, n in now.items()})
