"""What to change, and what it would bring: predictions for a change, and the change that a profile proposes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf

from pipegraph.errors import GraphError
from pipegraph.integers import amount, flag, integer
from pipegraph.units import counted, format_gain

from .bottleneck import CONSUMER
from .looks import no_faster
from .model import COMPUTES, LONGER, Pipeline, Work, best_sizes, exceeds, limit_words, pipeline_of
from .values import Profile, run_busy, run_of

WORTH = 0.05
"""A predicted gain that is worth a sentence."""


@dataclass(frozen=True)
class Prediction:
    """What to expect of a change.

    Attributes:
        samples_per_s: delivered to the training loop.
        gain: by how much more than now, 0.5 being half as much again.
        bottleneck: what would set the pace then: a stage, ``"consumer"``, ``"cores"`` or ``"lock"``.
        at_most: whether the gain presumes that workers do not wait for each other: for a rate limit, a pool of
            connections, an event loop, the GIL.
        why: why the stage has no use of these workers, or of all of them, and what helps instead; "" if it has.
    """

    samples_per_s: float
    gain: float
    bottleneck: str
    at_most: bool = False
    why: str = ""

    def __str__(self) -> str:
        about = "at most" if self.at_most else "about"
        return f"{about} {self.samples_per_s:,.0f} samples/s ({format_gain(self.gain)})"


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
    prediction: Prediction = Prediction(0.0, 0.0, CONSUMER)
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
        if not self.prediction.gain:
            return f"{', '.join(words)} and no more: {self.limit}."
        return f"With {', '.join(words)}: {self.prediction}; then {self.limit}."


def predict(
    profile: Profile, stage: str, *, workers: int | None = None, cost: float = 1.0, cached: bool = False
) -> Prediction:
    """See :meth:`pipegraph.profile.Profile.what_if`."""
    now = pipeline_of(profile)
    cached = flag(cached, "what_if: cached")
    cost = amount(cost, "what_if: cost", refusal=GraphError)
    if cost == inf:
        raise GraphError("what_if: cost must be finite, got inf")
    if workers is not None:
        workers = integer(workers, "what_if: workers", rule="must be >= {}, of a stage that has some,")
    if isinstance(stage, str) and (stage == CONSUMER or stage in profile.stages):
        stage, share = _share_of_run(profile, stage, cached)
    if not isinstance(stage, str) or (stage not in now.works and stage != CONSUMER):
        names = ", ".join([*now.works, CONSUMER])
        raise GraphError(f"what_if: there is no stage {stage!r} that runs; there are: {names}")
    if workers is not None and stage == CONSUMER:
        raise GraphError(f"what_if: workers must be >= 1, of a stage that has some, not of {CONSUMER!r}")
    if not profile.items:
        return Prediction(0.0, 0.0, profile.bottleneck)
    if stage == CONSUMER:
        step_s = 0.0 if cached else now.step_s * cost
        return _prediction(profile, now, replace(now, step_s=step_s))
    changed = dict(now.works)
    free = now.above(stage) if cached else set()
    if share < 1:  # the rest of its run works on
        free -= {stage}
    for name in free:
        changed[name] = replace(now.works[name], seconds=0.0, service_s=0.0, core_s=0.0, alone_s=0.0)
    work, why = now.works[stage], ""
    if stage not in free:
        kept = 1 - share * (1 - (0.0 if cached else cost))
        changed[stage] = replace(
            work,
            seconds=max(0.0, work.seconds - work.service_s * (1 - kept)),
            service_s=work.service_s * kept,
            core_s=work.core_s * kept,
        )
    sizes = now.sizes
    if workers is not None and not work.inline:
        if workers > max(work.most, work.size.workers):
            why = work.why + (f"; what helps: {work.helps}" if work.helps else "")
        sizes[stage] = work.sized(int(min(workers, max(work.most, work.size.workers))))
    grows = sizes[stage].workers > work.size.workers
    return _prediction(profile, now, replace(now, works=changed), sizes, grows and work.presumes, why)


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
    run = run_of(profile.stages, name)
    return [each for each in run if each == name or not profile.stages[each].backend.in_consumer]


def _advice(profile: Profile) -> Advice:
    """The advice, by stages that have workers of their own."""
    if not profile.conclusive:
        return Advice(limit="passes ran too briefly")
    if profile.bottleneck == CONSUMER and profile.cause == "consumer":
        return Advice(limit="training sets the pace")
    now = pipeline_of(profile)
    known = no_faster(profile)
    if known.back:
        name = next(iter(known.back))
        why = known.stuck.get(name) or known.short[name]
        return Advice(known.back, (), _prediction(profile, now, now), limit_words(name, why))
    if profile.cause == "bursts":
        longer = _longer_queues(profile, now, known.short)
        if longer.settings or profile.bottleneck == CONSUMER:
            return longer
    changed, processes = _in_processes(profile, now)
    if not processes:
        if profile.cause == "memory":
            return Advice(limit="its workers wait for room under memory_limit")
        if profile.cause == "cores":
            return Advice(limit="no core is free")
    then, limit, why = best_sizes(changed, fixed=known.stuck)
    grown = {name: size for name, size in then.items() if size.workers != now.works[name].size.workers}
    presumes = bool(processes) or any(now.works[name].presumes for name in grown)
    found = _prediction(profile, now, changed, then, presumes)
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


def _longer_queues(profile: Profile, now: Pipeline, short: Mapping[str, str]) -> Advice:
    settings = {}
    for channel in profile.channels:
        if channel.in_bursts and channel.producer in now.works.keys() - short:
            work = now.works[channel.producer]
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
    return Advice(settings, (), Prediction(rate, round(gain, 6), limit, True), _limit(None, limit, ""))


def _limit(work: Work | None, limit: str, why: str) -> str:
    """What allows no more, and what helps, in words."""
    words = limit_words(limit, why)
    return words + (f"; what helps: {work.helps}" if work is not None and work.helps else "")


def _prediction(
    profile: Profile,
    now: Pipeline,
    changed: Pipeline,
    sizes: Mapping[str, object] | None = None,
    at_most: bool = False,
    why: str = "",
) -> Prediction:
    chunks, limit = now.predicted(now.sizes if sizes is None else sizes, changed)  # type: ignore[arg-type]
    samples = profile.samples / profile.items * chunks
    rate = profile.samples_per_s
    gain = samples / rate - 1 if rate else 0.0
    # Without the errors of floats, and without -0.0.
    return Prediction(samples, gain if gain == inf else round(gain, 6) + 0.0, limit, at_most, why)


def _share_of_run(profile: Profile, name: str, cached: bool) -> tuple[str, float]:
    """The stage whose workers do a stage's work, and its share of theirs; where it is cached, with those before it."""
    stage = profile.stages.get(name)
    host = name if stage is None or not stage.busy else stage.within or name
    run, busy = run_of(profile.stages, host), run_busy(profile.stages, host)
    if not busy:
        return host, 1.0
    parts = run[: run.index(name) + 1] if cached else [name]
    return host, min(1.0, sum(profile.stages[each].busy for each in parts) / busy)
