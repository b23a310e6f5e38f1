"""Predicts throughput for a changed stage: a pure function over a profile.

The pipeline runs as fast as its most loaded resource allows (Denning and Buzen, "The Operational Analysis of Queueing
Network Models", 1978: throughput is at most workers / demand, demand being the seconds of work for one delivered
chunk). Resources are the workers of each stage, the training loop with the inline stages that it drives, the cores,
and the GIL where a stage holds it. The measured run says how near it came to its own bound; the same
share is expected of the changed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipegraph.errors import GraphError

from .bottleneck import CONSUMER
from .values import Profile, run_busy, run_of

CORES = "cores"
LOCK = "lock"


@dataclass(frozen=True)
class Prediction:
    """What to expect of a change.

    Attributes:
        samples_per_s: delivered to the training loop.
        gain: by how much more than now, 0.5 being half as much again.
        bottleneck: what would set the pace then: a stage, ``"consumer"``, ``"cores"`` or ``"lock"``.
    """

    samples_per_s: float
    gain: float
    bottleneck: str


@dataclass(frozen=True)
class Demand:
    """What one delivered chunk needs of a stage.

    Attributes:
        seconds: of a worker that neither waits for input nor for room.
        service_s: of these, work of the operator.
        core_s: of these, on a core.
        workers: how many there are; 0 for a stage that runs in the threads that wait for it.
        feeds: stages that read from it.
        locked: whether its time on a core is time with the GIL.
    """

    seconds: float
    service_s: float
    core_s: float
    workers: int
    feeds: tuple[str, ...]
    locked: bool = False


def demands(profile: Profile) -> dict[str, Demand]:
    """Of each stage that runs, and of the training loop."""
    per_chunk = profile.elapsed_s / max(1, profile.items)
    feeds: dict[str, list[str]] = {}
    for channel in profile.channels:
        feeds.setdefault(channel.producer, []).append(channel.consumer)
    found = {}
    for name, stage in profile.stages.items():
        if not stage.workers:
            continue
        inline = stage.backend.in_consumer
        waits = 0.0 if stage.items == 0 else max(0.0, 1 - stage.starved - stage.blocked)
        busy = run_busy(profile.stages, name)
        occupied = busy if inline else max(busy, min(waits, busy * OVERHEAD))
        found[name] = Demand(
            seconds=occupied * stage.workers * per_chunk,
            service_s=busy * stage.workers * per_chunk,
            core_s=(stage.busy if inline else stage.running or 0.0) * stage.workers * per_chunk,
            workers=0 if inline else stage.workers,
            feeds=tuple(feeds.get(name, ())),
            locked=stage.backend.in_trainer,
        )
    found[CONSUMER] = Demand(profile.step_s, profile.step_s, 0.0, 1, ())
    return found


OVERHEAD = 1.5
"""A worker's time for an item beyond that in its operator: at most half as much again, else it is waiting that no
queue has counted, such as a source's that has read everything."""


def predict(
    profile: Profile, stage: str, *, workers: int | None = None, cost: float = 1.0, cached: bool = False
) -> Prediction:
    """See :meth:`pipegraph.profile.Profile.what_if`."""
    now = demands(profile)
    stage, share = _share_of_run(profile, stage, cached)
    if stage not in now:
        raise GraphError(f"what_if: there is no stage {stage!r} that runs; there are: {', '.join(now)}")
    if cost < 0:
        raise GraphError(f"what_if: cost must be >= 0 times as much, got {cost!r}")
    if workers is not None and (workers < 1 or stage == CONSUMER):
        raise GraphError(f"what_if: workers must be >= 1, of a stage that has some, got {workers!r}")
    if not profile.items:
        return Prediction(0.0, 0.0, profile.bottleneck)
    changed = dict(now)
    free = _above(now, stage) if cached else set()
    if share < 1:  # the rest of its run works on
        free -= {stage}
    for name in free:
        changed[name] = Demand(0.0, 0.0, 0.0, now[name].workers, now[name].feeds)
    if stage not in free:
        old = now[stage]
        kept = 1 - share * (1 - (0.0 if cached else cost))
        changed[stage] = Demand(
            seconds=max(0.0, old.seconds - old.service_s * (1 - kept)),
            service_s=old.service_s * kept,
            core_s=old.core_s * kept,
            workers=old.workers if workers is None or not old.workers else workers,
            feeds=old.feeds,
            locked=old.locked,
        )
    before, _ = _bound(now, profile)
    after, limit = _bound(changed, profile)
    # What the pipeline reached of its own bound; above it only by the errors of measuring.
    reached = min(1.0, profile.items / profile.elapsed_s / before) if before else 0.0
    samples = profile.samples / profile.items * after * reached
    rate = profile.samples_per_s
    gain = samples / rate - 1 if rate else 0.0
    return Prediction(samples, round(gain, 6) + 0.0, limit)  # without the errors of floats, and without -0.0


def _share_of_run(profile: Profile, name: str, cached: bool) -> tuple[str, float]:
    """The stage whose workers do a stage's work, and its share of theirs; where it is cached, with those before it."""
    stage = profile.stages.get(name)
    host = name if stage is None or not stage.busy else stage.within or name
    run, busy = run_of(profile.stages, host), run_busy(profile.stages, host)
    if not busy:
        return host, 1.0
    parts = run[: run.index(name) + 1] if cached else [name]
    return host, min(1.0, sum(profile.stages[each].busy for each in parts) / busy)


def _above(found: Mapping[str, Demand], stage: str) -> set[str]:
    """The stage and those above it whose output goes nowhere else."""
    above = {stage}
    for name in reversed(list(found)):
        if found[name].feeds and all(consumer in above for consumer in found[name].feeds):
            above.add(name)
    return above


def _bound(found: Mapping[str, Demand], profile: Profile) -> tuple[float, str]:
    """The most chunks per second, and what allows no more."""
    loads: dict[str, float] = {}
    for name, demand in found.items():
        drivers = _drivers(found, name) if not demand.workers else [name]
        for driver in drivers:
            share = demand.seconds / max(1, found[driver].workers) / len(drivers)
            loads[driver] = loads.get(driver, 0.0) + share
    core_s = sum(demand.core_s for demand in found.values())
    cores_used = sum(each.core_s for each in demands(profile).values()) or 1.0
    if profile.cause == "cores":  # it is full as it is now
        loads[CORES] = profile.elapsed_s / profile.items * core_s / cores_used
    elif profile.cores:
        loads[CORES] = core_s / profile.cores
    if profile.cause == "lock":
        held = sum(each.core_s for each in demands(profile).values() if each.locked) or 1.0
        locked = sum(each.core_s for each in found.values() if each.locked)
        loads[LOCK] = profile.elapsed_s / profile.items * locked / held
    limit = max(loads, key=lambda name: loads[name])
    return (1 / loads[limit] if loads[limit] > 0 else float("inf")), limit


def _drivers(found: Mapping[str, Demand], name: str) -> list[str]:
    """Who does an inline stage's work: the nearest stages below with workers of their own."""
    drivers: list[str] = []
    for consumer in found[name].feeds or (CONSUMER,):
        drivers += [consumer] if found[consumer].workers else _drivers(found, consumer)
    return drivers
