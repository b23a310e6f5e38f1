"""Earlier looks at a graph: how fast it was with other sizes, in earlier loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipegraph.planning.plan import Plan

from .model import Size
from .values import Look, Profile

Vain = Sequence[tuple[Mapping[str, tuple[Size, Size]], float]]
"""Changes that a tuner took back, stage -> (size before, size after), with the rate after over that before."""

LOOK_S = 0.5
"""The minimum duration of passes that tell."""

NO_FASTER = 1.05
"""The rate with larger sizes, over that with smaller ones, up to which they did not help."""


def compared(looks: dict[Look, float], plan: Plan, profile: Profile, vain: Vain = ()) -> Profile:
    """The profile with how fast earlier loaders of the graph were; adds this one to them.

    A loader that tunes itself is compared with what its tuner tried in ``vain``, and with no other: its rate is that of
    several sizes.
    """
    if profile.elapsed_s < LOOK_S:
        return profile
    capacities = {channel.producer: channel.capacity for channel in profile.channels}
    sizes = tuple(
        (name, stage.workers, capacities.get(name, 1))
        for name, stage in profile.stages.items()
        if stage.workers
    )
    if any(stage.tuned for stage in plan.running):
        return replace(profile, look=sizes, looks=_taken_back(sizes, profile.samples_per_s, vain))
    looks[sizes] = max(looks.get(sizes, 0.0), profile.samples_per_s)
    return replace(profile, look=sizes, looks=dict(looks))


def _taken_back(sizes: Look, rate: float, vain: Vain) -> dict[Look, float]:
    """This rate, and what it would be with the larger sizes that were no faster when the tuner tried them."""
    found, now = {sizes: rate}, _sizes(sizes)
    for changes, brought in vain:
        then = dict(now)
        for name, (old, new) in changes.items():
            workers = now.get(name, (0, 0))[0]
            if old.workers <= workers < new.workers or old.workers == workers == new.workers:
                then[name] = new.workers, max(now[name][1], new.capacity)
        if then != now:
            look = tuple((name, *size) for name, size in then.items())
            found[look] = min(rate, rate * brought)
    return found


@dataclass(frozen=True)
class Known:
    """What earlier looks say of the sizes now.

    Attributes:
        back: smaller sizes that were as fast, for the stages where they differ.
        stuck: stages that more workers did not help, and how that is known.
        short: stages that longer queues did not help, likewise.
    """

    back: dict[str, dict[str, int]] = field(default_factory=dict)
    stuck: dict[str, str] = field(default_factory=dict)
    short: dict[str, str] = field(default_factory=dict)


def no_faster(profile: Profile) -> Known:
    """What earlier loaders of the graph have shown; nothing if there are none."""
    known, now = Known(), _sizes(profile.look)
    rate = profile.looks.get(profile.look, 0.0)
    best = rate / NO_FASTER
    for look, other in profile.looks.items():
        then = _sizes(look)
        differ = [name for name in now if then.get(name) != now[name]]
        if not differ or then.keys() != now.keys():
            continue
        if all(_at_least(now[name], then[name]) for name in differ) and other >= best:
            best, fewer, more = other, then, now
            known.back.clear()
            for name in differ:
                known.back[name] = {"capacity": then[name][1]}
                if then[name][0] < now[name][0]:
                    known.back[name]["workers"] = then[name][0]
        elif all(_at_least(then[name], now[name]) for name in differ) and other < rate * NO_FASTER:
            fewer, more = now, then
        else:
            continue
        for name in differ:
            (few, short), (many, long) = fewer[name], more[name]
            if few < many:
                known.stuck[name] = (
                    f"{many} workers were no faster than {few}: they wait for each other, or for what they share"
                )
            else:
                known.short[name] = f"a capacity of {long} was no faster than one of {short}"
    return known


def _sizes(look: Look) -> dict[str, tuple[int, int]]:
    return {name: (workers, capacity) for name, workers, capacity in look}


def _at_least(size: tuple[int, int], other: tuple[int, int]) -> bool:
    return size[0] >= other[0] and size[1] >= other[1]
