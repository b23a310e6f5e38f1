"""What of a plan may change while it runs: the workers and the queue of which stages. Pure."""

from __future__ import annotations

from dataclasses import replace

from pipegraph.planning.draft import Draft
from pipegraph.planning.plan import Plan, StagePlan

WORKERS, CAPACITY = "workers", "capacity"


def mark_tuned(draft: Draft) -> None:
    """Say for each stage what of that which its user left to the tuner can be tuned, and why the rest cannot."""
    for stage in draft.running():
        asked, why = stage.spec.tuned, _why_fixed(stage)
        fixed = f"workers='auto' means {stage.workers} here: {why}"
        notes = [fixed] if WORKERS in asked and why is not None else []
        draft.change(stage.name, *notes, tuned=_possible(stage, asked))


def tune_all(plan: Plan) -> Plan:
    """The plan with everything tuned that can be."""
    everything = {
        stage.name: replace(stage, tuned=_possible(stage, (WORKERS, CAPACITY))) for stage in plan.running
    }
    return replace(plan, stages={**plan.stages, **everything})


def why_not_tuned(plan: Plan) -> str:
    """For the error about a loader of which nothing is tuned."""
    asked = [stage.name for stage in plan.stages.values() if stage.spec.tuned]
    if asked:
        names = ", ".join(map(repr, asked))
        return f"this loader is not tuned: 'auto' cannot be kept in {names}; print(graph.plan()) says why"
    return "this loader is not tuned: make it with graph.loader(autotune=True), or give stages workers='auto'"


def _possible(stage: StagePlan, asked: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(each for each in asked if each == CAPACITY or _why_fixed(stage) is None)


def _why_fixed(stage: StagePlan) -> str | None:
    """Why the number of a stage's workers cannot change while it runs."""
    cached = f"what {stage.cached_in!r} knows already is passed over by a fixed set of workers"
    return (
        stage.backend.why_fixed or stage.kind.fixed(stage.operator) or (cached if stage.cached_in else None)
    )
