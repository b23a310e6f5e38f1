"""What a profile proposes to change, in one step, and what that would bring. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf

from pipegraph.planning.plan import SAMPLES_PER_QUEUE
from pipegraph.units import counted, format_gain

from .bottleneck import CONSUMER
from .model import (
    COMPUTES,
    LONGER,
    PLACES,
    Pipeline,
    Sizes,
    Work,
    best_sizes,
    exceeds,
    limit_words,
    pipeline_of,
)
from .values import Profile

WORTH = 0.05
"""A predicted gain that is worth a sentence."""


@dataclass(frozen=True)
class Prediction:
    """What to expect of a change.

    Attributes:
        samples_per_s: delivered to the training loop.
        gain: by how much more than now, 0.5 being half as much again, if workers do not wait for each other: for a
            rate limit, a pool of connections, an event loop, the GIL.
    """

    samples_per_s: float
    gain: float

    def __str__(self) -> str:
        return f"at most {self.samples_per_s:,.0f} samples/s ({format_gain(self.gain)})"


@dataclass(frozen=True)
class Advice:
    """What a profile proposes, in one step.

    Attributes:
        settings: workers and capacities, as ``graph.resize`` takes them; empty if no other sizes would help.
        processes: stages that should get ``backend="process"``.
        prediction: with all of these.
        limit: why nothing more is proposed, in words.
    """

    settings: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    processes: tuple[str, ...] = ()
    prediction: Prediction = Prediction(0.0, 0.0)
    limit: str = ""

    def __str__(self) -> str:
        words = [f'{name!r} with backend="process"' for name in self.processes]
        for name, size in self.settings.items():
            if "workers" in size:
                words.append(f"{counted(size['workers'], 'worker')} in {name!r}")
            else:
                words.append(f"capacity={size['capacity']} in {name!r}")
        if not words:
            return f"No other sizes help: {self.limit}."
        return f"With {', '.join(words)}: {self.prediction}; then {self.limit}."


def advise(profile: Profile) -> Advice:
    """See :attr:`pipegraph.profile.Profile.advice`."""
    found = _advice(profile)
    runs = {name: _run(profile, name) for name in (*found.settings, *found.processes)}
    settings: dict[str, dict[str, int]] = {}
    for name, size in found.settings.items():
        for each in runs[name]:
            # Stages share their workers only while they have as many; their queue is that of the last.
            given = {what: n for what, n in size.items() if what != "capacity" or each == runs[name][-1]}
            if given:
                settings[each] = given
    processes = tuple(each for name in found.processes for each in runs[name])
    return replace(found, settings=settings, processes=processes)


def _run(profile: Profile, name: str) -> list[str]:
    """The stages whose work a stage's workers do, but for inline ones, which have no workers to set."""
    return [
        each
        for each, stage in profile.stages.items()
        if each == name or (stage.within == name and not stage.backend.in_consumer)
    ]


def _advice(profile: Profile) -> Advice:
    """The advice, by stages that have workers of their own."""
    if not profile.conclusive:
        return Advice(limit="passes ran too briefly")
    if profile.bottleneck == CONSUMER and profile.cause == "consumer":
        return Advice(limit="training sets the pace")
    now = pipeline_of(profile)
    if profile.cause == "bursts":
        longer = _longer_queues(profile, now)
        if longer.settings or profile.bottleneck == CONSUMER:
            return longer
    changed, processes = _in_processes(profile, now)
    if not processes and profile.cause == "cores":
        return Advice(limit="no core is free")
    then, limit, why = best_sizes(changed)
    grown = {name: size for name, size in then.items() if size.workers != now.works[name].size.workers}
    found = _prediction(profile, now, changed, then)
    words = _limit(now.works.get(limit), limit, why)
    if found.gain < WORTH or not (grown or processes):
        return Advice(limit=words)
    settings = {}
    for name, size in grown.items():
        settings[name] = {"workers": size.workers}
        if size.capacity > now.works[name].size.capacity:
            settings[name]["capacity"] = size.capacity
    return Advice(settings, processes, found, words)


def _in_processes(profile: Profile, now: Pipeline) -> tuple[Pipeline, tuple[str, ...]]:
    """The pipeline with what holds the GIL in processes, and the stages that would be there."""
    names = (profile.bottleneck, *now.works) if profile.cause == "lock" else (profile.bottleneck,)
    held = [name for name in dict.fromkeys(names) if name in now.works and now.works[name].locked]
    if not held:
        return now, ()
    cores = profile.cores
    works = {}
    for name, work in now.works.items():
        if name in held:
            fixed = profile.stages[name].fixed
            most = work.size.workers if fixed is not None else max(work.size.workers, ceil(cores) or 1)
            why = fixed or f"it computes, and there are {cores:g} cores"
            work = replace(
                work, seconds=work.core_s, threads=False, locked=False, process=True, most=most, why=why
            )
        elif work.threads and work.core_s < COMPUTES * work.service_s and profile.cause == "lock":
            # What else it waits for is not known: some of it was the GIL.
            work = replace(work, seconds=work.core_s)
        works[name] = work
    return replace(now, works=works, locked=False), tuple(held)


def _longer_queues(profile: Profile, now: Pipeline) -> Advice:
    settings = {}
    for channel in profile.channels:
        if channel.in_bursts and channel.producer in now.works:
            work, stage = now.works[channel.producer], profile.stages[channel.producer]
            # Once is enough: what a longer queue has not helped, one that is longer still does not either.
            usual = max(PLACES * work.size.workers, SAMPLES_PER_QUEUE if stage.samples <= stage.items else 0)
            if channel.capacity > usual:
                continue
            then = {channel.producer: replace(work.size, capacity=LONGER * channel.capacity)}
            why = exceeds(now, then)
            if why is not None:
                return Advice(limit=why)
            settings[channel.producer] = {"capacity": LONGER * channel.capacity}
    bound, limit = now.bound(now.sizes)
    gain = now.period_s / bound - 1 if bound else 0.0
    if gain < WORTH or not settings:
        return Advice(limit=_limit(now.works.get(limit), limit, ""))
    rate = profile.samples_per_s * (1 + gain)
    return Advice(settings, (), Prediction(rate, round(gain, 6)), _limit(None, limit, ""))


def _limit(work: Work | None, limit: str, why: str) -> str:
    """What allows no more, and what helps, in words."""
    words = limit_words(limit, why)
    return words + (f"; what helps: {work.helps}" if work is not None and work.helps else "")


def _prediction(profile: Profile, now: Pipeline, changed: Pipeline, sizes: Sizes) -> Prediction:
    samples = profile.samples / profile.items * now.predicted(sizes, changed)
    rate = profile.samples_per_s
    gain = samples / rate - 1 if rate else 0.0
    # Without the errors of floats, and without -0.0.
    return Prediction(samples, gain if gain == inf else round(gain, 6) + 0.0)
