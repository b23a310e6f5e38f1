"""How fast a pipeline would be with other sizes, and which sizes are best: one model for predictions, advice and tuner.

The pipeline runs as fast as its most loaded resource allows (Denning and Buzen, "The Operational Analysis of Queueing
Network Models", 1978: throughput is at most workers / demand, demand being the seconds of work for one delivered
chunk). Resources are the workers of each stage, what a stage does one item at a time, the training loop with the inline
stages that it drives, the cores, and the GIL where a stage holds it. The measured run says how near it came to its own
bound; the same share is expected of the changed one. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf
from types import MappingProxyType

from pipegraph.measurements import StageProfile

from .bottleneck import CONSUMER, LATE_S
from .values import Profile

CORES, LOCK = "cores", "lock"

OVERHEAD = 1.5
"""A worker's time for an item beyond that in its operator: at most half as much again, else it is waiting that no
queue has counted, such as a source's that has read everything."""

COMPUTES, NO_CORE = 0.5, 0.1
"""Share of its work, but for the time without a core, that a stage runs on one from which on each worker needs one; and
the part of its work that is left at least: what sleeps is late to continue where others take the cores."""

HOLDS = 0.7
"""Share of its work that a thread runs on a core where it can keep the GIL from others."""

WAITING_WORKERS, MIN_THREADS = 16, 256
"""Workers in all: per core, and on any machine, for a thread that waits costs no core."""

MOST_WAITING = 64
"""Workers of one stage that waits: each may be a connection to a service that others use too."""

PINNED_PART = 4
"""The part of the memory limit that may be pinned is one over this."""

LONGER = 8
"""A queue that is too short for bursts is lengthened by this factor."""

PLACES = 2
"""Places in its queue for each worker: one in work, one ready."""

SPARE = 1.15
"""Workers beyond those that exactly keep pace with what cannot be raised: durations vary."""


@dataclass(frozen=True)
class Size:
    """What a stage has: workers, and items that each of its queues may hold."""

    workers: int
    capacity: int


Sizes = Mapping[str, Size]


@dataclass(frozen=True)
class Work:
    """What one delivered chunk needs of a stage, in seconds, and what the stage may have.

    Attributes:
        seconds: of a worker that waits neither for input nor for room.
        service_s: of these, work of the operator.
        core_s: of these, on a core.
        alone_s: of the stage, one item at a time whatever its workers: a sampler's draws.
        size: as it is.
        most: workers that it may have, and ``why`` not more; ``helps`` says what does, if anything.
        feeds: stages that read from it.
        inline: it runs in the threads that wait for it.
        threads: its time on a core is time in the trainer's process; ``locked`` with the GIL.
        process: its workers are processes of this machine.
        item_bytes: of what one worker, or one place in a queue, holds; ``pinned`` if in pinned memory.
    """

    seconds: float
    service_s: float = 0.0
    core_s: float = 0.0
    alone_s: float = 0.0
    size: Size = Size(1, 1)
    most: float = inf
    why: str = ""
    helps: str = ""
    feeds: tuple[str, ...] = (CONSUMER,)
    inline: bool = False
    threads: bool = True
    locked: bool = False
    process: bool = False
    item_bytes: int = 0
    pinned: bool = False

    def sized(self, workers: int, places: int = PLACES) -> Size:
        """The size with this number of workers, and room for what they make."""
        return Size(workers, max(self.size.capacity, places * workers))


@dataclass(frozen=True)
class Limits:
    """What all stages together may use.

    Attributes:
        cores: of the machine, or of the cgroup.
        memory: bytes that chunks may hold, of which ``held`` are the most that they have held.
        process: bytes that one more worker process would take, and that are there for it.
    """

    cores: float = inf
    memory: float = inf
    held: int = 0
    process: tuple[int, float] = (0, inf)

    @property
    def threads(self) -> int:
        """Workers in all."""
        return max(MIN_THREADS, ceil(WAITING_WORKERS * self.cores) if self.cores < inf else 0)


@dataclass(frozen=True)
class Pipeline:
    """One look at a pipeline: the work of its stages from source to sink, and of training.

    Attributes:
        period_s: seconds per delivered chunk, as measured.
        step_s: of training itself.
        full: all cores are in use, as it is.
        locked: the GIL is held all the time, as it is.
    """

    works: Mapping[str, Work]
    period_s: float
    step_s: float = 0.0
    limits: Limits = field(default_factory=Limits)
    full: bool = False
    locked: bool = False

    @property
    def sizes(self) -> dict[str, Size]:
        """Of all stages, as they are."""
        return {name: work.size for name, work in self.works.items()}

    def loads(self, sizes: Sizes, before: Pipeline | None = None) -> dict[str, float]:
        """Seconds per delivered chunk that each resource needs; ``before`` is the pipeline that was measured."""
        before = before or self
        loads: dict[str, float] = {CONSUMER: self.step_s}
        for name, work in self.works.items():
            if not work.inline:
                own = work.seconds / max(1, sizes.get(name, work.size).workers)
                loads[name] = loads.get(name, 0.0) + max(own, work.alone_s)
        for name, work in self.works.items():
            if work.inline:
                drivers = self._drivers(name)
                for driver in drivers:
                    workers = 1 if driver == CONSUMER else sizes.get(driver, self.works[driver].size).workers
                    loads[driver] += work.seconds / workers / len(drivers)
        for name, locked, full, there in (
            (CORES, False, before.full, self.limits.cores),
            (LOCK, True, before.locked, 1.0),
        ):
            used = self._core_s(locked)
            if full:
                loads[name] = before.period_s * used / (before._core_s(locked) or 1.0)
            elif used:
                loads[name] = used / (there or inf)
        return loads

    def _core_s(self, locked: bool) -> float:
        """Seconds on a core per delivered chunk, of all stages or of those that hold the GIL."""
        return sum(work.core_s for work in self.works.values() if work.locked or not locked)

    def bound(self, sizes: Sizes, before: Pipeline | None = None) -> tuple[float, str]:
        """The least seconds per chunk, and what allows no fewer."""
        loads = self.loads(sizes, before)
        limit = max(loads, key=lambda name: loads[name])
        return loads[limit], limit

    def predicted(self, sizes: Sizes, changed: Pipeline | None = None) -> float:
        """Chunks per second to expect with these sizes, and of a pipeline with other work."""
        (now, _), (then, _) = self.bound(self.sizes), (changed or self).bound(sizes, self)
        rate = 1 / self.period_s if self.period_s else 0.0
        # What the pipeline reached of its own bound; above it only by the errors of measuring.
        reached = min(1.0, now * rate)
        return reached / then if then > 0 else rate if not now else inf

    def _drivers(self, name: str) -> list[str]:
        """Who does an inline stage's work: the nearest stages below with workers of their own."""
        drivers: list[str] = []
        for consumer in self.works[name].feeds or (CONSUMER,):
            inline = consumer != CONSUMER and self.works[consumer].inline
            drivers += self._drivers(consumer) if inline else [consumer]
        return drivers


def best_sizes(
    pipeline: Pipeline, most: float = inf, fixed: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[str, Size], str, str]:
    """The sizes that are as fast as any, with the fewest workers; what sets the pace then, and why it cannot be helped.

    Args:
        most: how many times as many workers as now a stage may have.
        fixed: stages whose workers stay as they are, and why.
    """
    sizes = pipeline.sizes
    while True:
        loads = pipeline.loads(sizes)
        raised = {
            name: load * SPARE for name, load in loads.items() if _may_grow(pipeline, name, sizes, fixed)
        }
        loads |= raised
        limit = max(loads, key=lambda name: loads[name])
        work = pipeline.works.get(limit)
        if work is None:
            return sizes, limit, ""
        if limit not in raised:
            held = sizes[limit].workers >= work.most and work.why
            return sizes, limit, held or fixed.get(limit, work.why)
        workers = sizes[limit].workers + 1
        if workers > max(most * work.size.workers, work.size.workers + 1):
            return sizes, limit, ""
        why: str | None = None
        for places in range(PLACES, -1, -1):  # memory may be worth more in work than in a queue
            then = {**sizes, limit: work.sized(workers, places)}
            why = exceeds(pipeline, then)
            if why is None:
                break
        if why is not None:
            return sizes, limit, why
        sizes = then


def _may_grow(pipeline: Pipeline, name: str, sizes: Sizes, fixed: Mapping[str, str]) -> bool:
    work = pipeline.works.get(name)
    if work is None or work.inline or name in fixed or sizes[name].workers >= work.most:
        return False
    return work.alone_s < work.seconds / sizes[name].workers


def limit_words(limit: str, why: str) -> str:
    """What allows no more, and why it cannot be helped, in words."""
    known = {
        CONSUMER: "training sets the pace",
        CORES: "all cores are in use",
        LOCK: "the GIL is held all the time",
    }
    return known.get(limit) or f"{limit!r} sets the pace" + (f": {why}" if why else "")


def exceeds(pipeline: Pipeline, then: Sizes) -> str | None:
    """Why these sizes would exceed a budget; None where they do not. What shrinks always fits."""
    works, limits, now = pipeline.works, pipeline.limits, pipeline.sizes
    grown = [name for name in then if then[name].workers > now[name].workers]
    for name in grown:
        if then[name].workers > works[name].most:
            return works[name].why
    total = sum(then.get(name, work.size).workers for name, work in works.items() if not work.inline)
    if grown and total > limits.threads:
        return f"{limits.threads} workers in all are the most that it is given"
    more = {
        name: works[name].item_bytes
        * (max(0, size.workers - now[name].workers) + max(0, size.capacity - now[name].capacity))
        for name, size in then.items()
    }
    if any(more.values()) and limits.held + sum(more.values()) > limits.memory:
        return f"memory_limit leaves {max(0, int(limits.memory) - limits.held):,} bytes"
    pinned = sum(
        work.item_bytes * (then.get(name, work.size).workers + then.get(name, work.size).capacity)
        for name, work in works.items()
        if work.pinned
    )
    if pinned * PINNED_PART > limits.memory and any(more.get(name) for name in works if works[name].pinned):
        return f"pinned memory is limited to {int(limits.memory) // PINNED_PART:,} bytes"
    new = sum(then[name].workers - now[name].workers for name in grown if works[name].process)
    if new and new * limits.process[0] > limits.process[1]:
        return f"{int(limits.process[1]):,} bytes of memory are left for processes"
    return None


def pipeline_of(profile: Profile) -> Pipeline:
    """The pipeline of a profile, or of an interval."""
    per_chunk = profile.elapsed_s / max(1, profile.items)
    feeds: dict[str, list[str]] = {}
    capacities: dict[str, int] = {}
    for channel in profile.channels:
        feeds.setdefault(channel.producer, []).append(channel.consumer)
        capacities[channel.producer] = channel.capacity
    delivered = _delivered(profile)
    works = {
        name: _work(
            profile,
            name,
            stage,
            per_chunk * delivered[name],
            tuple(feeds.get(name, ())),
            capacities.get(name, 1),
        )
        for name, stage in profile.stages.items()
        if stage.workers
    }
    measured = profile.measured
    limits = Limits(
        profile.cores or inf,
        profile.memory_limit or inf,
        profile.memory_peak_bytes,
        (measured.process_bytes if measured else 0, inf),
    )
    return Pipeline(
        works, per_chunk, profile.step_s, limits, profile.cause == "cores", profile.cause == "lock"
    )


def _delivered(profile: Profile) -> dict[str, float]:
    """Of each stage the part of its work whose results training got: the rest lies in queues that have filled."""
    parts: dict[str, float] = {}
    for name, stage in reversed(list(profile.stages.items())):
        fed = [channel for channel in profile.channels if channel.producer == name]
        taken = [
            parts.get(channel.consumer, 1.0) * max(1, stage.items - channel.gained) / stage.items
            for channel in fed
            if stage.items
        ]
        parts[name] = max(taken, default=1.0)
    return parts


def _work(
    profile: Profile, name: str, stage: StageProfile, per_chunk: float, feeds: tuple[str, ...], capacity: int
) -> Work:
    inline = stage.backend.in_consumer
    waits = 0.0 if stage.items == 0 else max(0.0, 1 - stage.starved - stage.blocked)
    busy = stage.busy
    occupied = busy if inline else max(busy, min(waits, busy * OVERHEAD))
    running = stage.busy if inline else stage.running or 0.0
    on_core = running / stage.busy if stage.busy else 0.0
    coreless = stage.coreless / stage.busy if stage.busy else 0.0
    per_worker = stage.workers * per_chunk
    work = Work(
        seconds=occupied * per_worker,
        service_s=busy * per_worker,
        core_s=running * per_worker,
        alone_s=stage.drawing * per_chunk,
        size=Size(stage.workers, capacity),
        feeds=feeds,
        inline=inline,
        threads=stage.backend.in_trainer,
        locked=holds_lock(profile, name, stage),
        process=stage.backend.measurable,
        item_bytes=stage.nbytes // stage.items if stage.items else 0,
        pinned=stage.pinned,
    )
    most, why, helps = _may_have(profile, stage, work, on_core > COMPUTES * max(NO_CORE, 1 - coreless))
    return replace(work, most=most, why=why, helps=helps)


def _may_have(profile: Profile, stage: StageProfile, work: Work, computes: bool) -> tuple[int, str, str]:
    """The workers that a stage may have, why not more, and what helps instead; ``computes``: each needs a core."""
    workers, cores = stage.workers, ceil(profile.cores)
    if stage.fixed is not None:
        return workers, stage.fixed, stage.remedy
    if work.alone_s > work.seconds / workers:
        helps = "a sampler whose indices are drawn before the pass"
        return workers, "its sampler draws one index after the other", helps
    if work.locked:
        return workers, "it holds the GIL", 'backend="process"'
    if computes and cores:
        return max(workers, cores), f"it computes, and there are {profile.cores:g} cores", ""
    if work.process and cores:
        return max(workers, 2 * cores), "two processes per core are the most that it is given", ""
    most = max(workers, MOST_WAITING)
    return most, f"{most} workers are the most that it is given", ""


def holds_lock(profile: Profile, name: str, stage: StageProfile) -> bool:
    """Whether a stage keeps the GIL from others, by evidence: it runs nearly all of its work, and wakes are late."""
    if (
        not stage.backend.in_trainer
        or stage.backend.in_consumer
        or profile.wake_s <= LATE_S
        or not stage.busy
    ):
        return False
    running, coreless = (stage.running or 0.0) / stage.busy, stage.coreless / stage.busy
    runs = running > HOLDS and coreless < 1 - HOLDS and stage.busy * stage.workers > HOLDS
    return runs or (profile.cause == "lock" and profile.bottleneck == name)
