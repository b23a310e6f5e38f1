"""Earlier looks at a graph: what its stages could do with other numbers of workers, in earlier loaders."""

from __future__ import annotations

from dataclasses import replace

from pipegraph.planning.plan import Plan

from .values import Profile

Looks = dict[str, dict[int, float]]
"""Of each stage, by its workers: the items per second that it could do if it were busy all the time."""

LOOK_S = 0.5
"""The minimum duration of passes that tell."""

SATURATED = 0.6
"""Share of its workers' time that a stage worked, from which on it shows what it can do."""


def compared(looks: Looks, plan: Plan, profile: Profile) -> Profile:
    """The profile with what earlier loaders of the graph have shown of its stages; adds what this one shows."""
    if profile.elapsed_s < LOOK_S or any("workers" in stage.tuned for stage in plan.running):
        return profile
    stages = dict(profile.stages)
    for name, stage in profile.stages.items():
        if stage.workers and stage.busy > SATURATED:
            looks.setdefault(name, {})[stage.workers] = stage.rate / stage.busy
        earlier = tuple((n, rate) for n, rate in sorted(looks.get(name, {}).items()) if n != stage.workers)
        if stage.workers and earlier:
            stages[name] = replace(stage, earlier=earlier)
    return replace(profile, stages=stages)
