"""Names the stage that limits throughput, from waits. Pure.

The bottleneck is the last stage, going from source to sink, whose workers are busy while its input
is full and its output is empty. On every edge either the producer waits because the queue is full,
or the consumer because it is empty; the one that waits less is the slower of the two (its utilisation is
higher: Denning and Buzen, "The Operational Analysis of Queueing Network Models", 1978). So the walk
starts at the training loop and goes up for as long as the input is empty more than it is full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipegraph.measurements import StageProfile

CONSUMER = "consumer"

NEGLIGIBLE = 0.05
"""A consumer that waits for less of its time than this is not held back: starting up alone takes some."""

STARTING = 0.1
"""Share of its time that the busiest stage may have waited for its first items and still set the pace; twice that where
it is far busier than all above it, since much of a short pass goes by before queues are full."""

LATE_S = 1e-3
"""Threads that take this long to continue once they are woken, with a free core, wait for the GIL: tens
of microseconds are usual, and the lock changes hands every 5 ms where many need it."""

MUCH, RAN = 0.3, 0.05
"""Cores that a stage must run on or wait for, for the others to wait because of it, and those that it must run on."""

LOCKED_OUT = 0.05
"""Share of its work that a stage neither runs nor lacks a core, where it waits for the lock."""

SATURATED = 0.9
"""Share of the cores in use from which on another worker finds none."""

CORELESS = 0.2
"""Share of its work that a stage waits for a core from which on cores, and not its own cost, hold it back."""

READS = 0.4
"""Share of its work that a stage neither runs nor lacks a core from which on it waits for storage."""

COMPUTES = 0.5
"""Share of its work, but for the time without a core, that a stage which is held back by cores runs on one."""

Cause = Literal["unknown", "consumer", "stage", "storage", "cores", "lock", "bursts"]
"""Why the bottleneck is one: training itself, the stage's own work, reading, too few cores, the GIL,
or a queue too short for bursts."""

BURSTS = 0.1
"""Share of its time that either side of a queue waits for it, from which on it is too short for bursts."""


@dataclass(frozen=True)
class EdgeFacts:
    """One edge of the graph while passes ran.

    Attributes:
        producer: a stage.
        consumer: a stage, or :data:`CONSUMER` for the training loop.
        empty: share 0..1 of the consumer's workers' time that they waited for this edge.
        full: share 0..1 of the producer's workers' time that they waited for room on it.
        inline: the producer runs in the consumer's thread, so that ``empty`` is the time it took.
    """

    producer: str
    consumer: str
    empty: float
    full: float
    inline: bool = False


def find_bottleneck(busy: Mapping[str, float], edges: Sequence[EdgeFacts]) -> str:
    """The stage that sets the pace, or :data:`CONSUMER` where training does.

    Args:
        busy: share 0..1 of its workers' time that each stage worked; ``CONSUMER`` for the training loop.
        edges: of the running graph, which has no cycle.

    >>> find_bottleneck(
    ...     {"read": 0.1, "decode": 1.0, "consumer": 0.2},
    ...     [EdgeFacts("read", "decode", 0.0, 0.9), EdgeFacts("decode", "consumer", 0.8, 0.0)],
    ... )
    'decode'
    """
    starved: dict[str, float] = defaultdict(float)
    for edge in edges:
        starved[edge.consumer] += edge.empty
    at = CONSUMER
    visited: set[str] = set()
    while True:
        visited.add(at)
        inputs = [edge for edge in edges if edge.consumer == at]
        if not inputs:
            return at
        edge = max(inputs, key=lambda each: each.empty)
        # An inline producer never waits for room: the two take turns, and the longer turn sets the pace.
        against = busy[at] if edge.inline else edge.full
        # A producer that neither works nor waits has sent everything: what is left is the drain.
        held_back = min(edge.empty, busy[edge.producer] + starved[edge.producer])
        if held_back <= max(against, NEGLIGIBLE):
            return at
        # While queues are still filling no stage waits for room. The busiest one then sets the pace: the longer the
        # wait, the more clearly so.
        busiest_above = max(busy[name] for name in _above(at, edges))
        if held_back <= 2 * STARTING and busy[at] >= busiest_above + max(0.0, held_back - STARTING):
            return at
        # Where another branch keeps the producer waiting for room, it is that branch which sets the pace.
        fullest = max((each for each in edges if each.producer == edge.producer), key=lambda each: each.full)
        down = fullest.full > held_back and fullest.consumer not in visited
        at = fullest.consumer if down else edge.producer


def _above(at: str, edges: Sequence[EdgeFacts]) -> set[str]:
    """The stages that a stage gets its input from, directly or not."""
    found: set[str] = set()
    waiting = [at]
    while waiting:
        consumer = waiting.pop()
        producers = {edge.producer for edge in edges if edge.consumer == consumer} - found
        found |= producers
        waiting += producers
    return found


def find_lock_holder(bottleneck: str, stages: Mapping[str, StageProfile], wake_s: float) -> str | None:
    """The stage that sets the pace because it holds the GIL; None where the lock is not the reason.

    A stage that waits for the lock inside its work looks busy and is not running. Threads in general are then late
    to continue, and it is the stage that runs most which keeps them waiting.

    Args:
        bottleneck: as the waits alone have it.
        stages: those whose work is in threads of this process.
        wake_s: mean seconds between a thread's being woken and its resumption, with a free core.

    >>> heavy, light = StageProfile(2, busy=1.0, running=0.475), StageProfile(1, busy=1.0, running=0.02)
    >>> find_lock_holder("light", {"heavy": heavy, "light": light}, 4e-3)
    'heavy'
    """
    if wake_s < LATE_S or bottleneck not in stages:
        return None
    cores = {name: (stage.running or 0.0) * stage.workers for name, stage in stages.items()}
    lacked = {name: stage.coreless * stage.workers for name, stage in stages.items()}
    busy = stages[bottleneck].busy * stages[bottleneck].workers
    holder = max(cores, key=lambda name: cores[name])
    waits = busy - cores[bottleneck] - lacked[bottleneck]
    others = holder != bottleneck and cores[bottleneck] > cores[holder] / 2
    wanted = cores[holder] + lacked[holder]
    if wanted < MUCH or cores[holder] < RAN or waits < busy * LOCKED_OUT or others:
        return None
    return holder


def find_cause(stage: StageProfile, reads: bool, cores_used: float, cores: float) -> Cause:
    """Why a stage that sets the pace, and not for the GIL, is as slow as it is.

    Args:
        reads: whether it brings data in from outside: storage, a dataset.
        cores_used: by this process and its workers on average, of the ``cores`` that they may use.

    >>> find_cause(StageProfile(1, busy=1.0, running=0.05), True, 0.3, 8)
    'storage'
    """
    # A stage that waits for something else inside its work gains little from a core; on a machine that is overloaded it
    # too is late to continue.
    running = stage.running or 0.0
    waits = stage.busy - running - stage.coreless
    computes = running > (stage.busy - stage.coreless) * COMPUTES
    if computes and (stage.coreless > stage.busy * CORELESS or cores_used > cores * SATURATED):
        return "cores"
    # Files in memory that are read without a core, or without the GIL, wait as well: only less than they run or would.
    if reads and waits > stage.busy * READS and running + stage.coreless / 4 < waits / 2:
        return "storage"
    return "stage"


def in_bursts(edge: EdgeFacts) -> bool:
    """Whether a queue was empty for its consumer in turn with full for its producer."""
    return not edge.inline and min(edge.empty, edge.full) >= BURSTS
