"""What the tuner knows and what it may use: values without behaviour of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

WAITING_WORKERS = 16
"""Workers per core, in all, where most of them wait for storage: beyond that they wait for each other."""

MIN_THREADS = 64


@dataclass(frozen=True)
class Size:
    """What a stage has: workers, and items that each of its queues may hold."""

    workers: int
    capacity: int


Sizes = Mapping[str, Size]


@dataclass(frozen=True)
class Queue:
    """A queue in one window. ``empty`` and ``full`` say whether its consumer, its producer waited for it."""

    producer: str
    consumer: str
    empty: bool = False
    full: bool = False
    unused: bool = False


@dataclass(frozen=True)
class Work:
    """What a stage does in one window; seconds are per chunk that the training loop was given.

    Attributes:
        work_s: of a worker that waits neither for input nor for room.
        core_s: of these, on a core.
        size: as planned; it stays so where the tuner may change neither.
        workers, capacity: the tuner may change them.
        computes: it works rather than waits, so that each of its workers needs a core.
        locked: it holds the GIL while it works: more threads do not help.
        process: its workers are processes.
        least: capacity below which its queues must not fall, per worker and in all.
        item_bytes: of what one worker, or one place in a queue, holds.
        pinned: these are pinned.
    """

    name: str
    work_s: float
    core_s: float = 0.0
    size: Size = Size(1, 1)
    workers: bool = True
    capacity: bool = True
    computes: bool = False
    locked: bool = False
    process: bool = False
    inline: bool = False
    least: tuple[int, int] = (1, 1)
    item_bytes: int = 0
    pinned: bool = False

    def among(self, sizes: Sizes) -> Size:
        """What it has where these are the sizes of the tuned stages."""
        return sizes.get(self.name, self.size)

    def queue_for(self, workers: int) -> int:
        """The minimum capacity for this number of workers."""
        return max(self.least[1], self.least[0] * workers)


@dataclass(frozen=True)
class Limits:
    """What all stages together may use.

    Attributes:
        cores: of the machine, or of the cgroup.
        memory: bytes that chunks may hold, of which ``held`` are the most that they have held.
        pinned: bytes of pinned memory.
        process: bytes that one more worker process would take, and that are there for it.
    """

    cores: float
    memory: int = 1 << 62
    held: int = 0
    pinned: int = 1 << 62
    process: tuple[int, int] = (0, 1 << 62)

    @property
    def threads(self) -> int:
        """Workers in all."""
        return max(MIN_THREADS, ceil(WAITING_WORKERS * self.cores))


@dataclass(frozen=True)
class Facts:
    """One window: stages by name from source to sink, queues, and the training loop's own step.

    Attributes:
        rate: chunks per second.
        stall: share of its time that the training loop waited.
        step_s: of training itself, per chunk.
        core_s: of this process and its workers, per chunk.
    """

    stages: Mapping[str, Work]
    edges: tuple[Queue, ...]
    rate: float
    stall: float
    step_s: float
    core_s: float
    budget: Limits
    refused: Mapping[str, str] = field(default_factory=dict)


def fits(facts: Facts, now: Sizes, then: Sizes) -> str | None:
    """Why a change would exceed a budget; None where it does not. What shrinks always fits."""
    stages, budget = facts.stages, facts.budget
    grown = [name for name in then if then[name].workers > now[name].workers]
    for name in grown:
        stage, most = stages[name], ceil(budget.cores)
        if stage.computes and then[name].workers > most:
            return f"{name!r} computes, and there are {budget.cores:g} cores"
        if stage.process and then[name].workers > 2 * most:
            return f"{name!r} would have more than two processes per core"
    total = sum(stage.among(then).workers for stage in stages.values() if not stage.inline)
    if grown and total > budget.threads:
        return f"{total} workers are more than {budget.threads}"
    more = {
        name: stages[name].item_bytes
        * (max(0, size.workers - now[name].workers) + max(0, size.capacity - now[name].capacity))
        for name, size in then.items()
    }
    if budget.held + sum(more.values()) > budget.memory and any(more.values()):
        return f"memory_limit leaves {max(0, budget.memory - budget.held):,} bytes"
    pinned = sum(
        stage.item_bytes * (stage.among(then).workers + stage.among(then).capacity)
        for stage in stages.values()
        if stage.pinned
    )
    if pinned > budget.pinned and any(more.get(name) for name in stages if stages[name].pinned):
        return f"pinned memory is limited to {budget.pinned:,} bytes"
    new = sum(then[name].workers - now[name].workers for name in grown if stages[name].process)
    if new and new * budget.process[0] > budget.process[1]:
        return f"{budget.process[1]:,} bytes of memory are left for processes"
    return None
