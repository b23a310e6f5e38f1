"""Where ``loader(isolate=True)`` cuts a plan into sidecar and trainer. Pure.

Stages that move chunks to pinned memory or to devices stay, and so does what lies behind them. A chunk keeps its
cursors across the cut, so only one-to-one stages may lie below it: cursors there are those that the whole plan knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipegraph.backends import PROCESS
from pipegraph.capabilities import Moves
from pipegraph.contracts import Source
from pipegraph.errors import GraphError
from pipegraph.planning.kind import KindOf
from pipegraph.planning.plan import SAMPLES_PER_QUEUE, Plan, StagePlan
from pipegraph.planning.rewrites import shortcut
from pipegraph.stage_spec import Edge, StageSpec

BATCHES_HERE = 1
"""Batches in the trainer's queue. The next one waits for its place there, and the one after that for the receiver."""


class RemoteStages(Source):
    """Stands for all that runs in the sidecar, in the trainer's part of the plan."""

    kind = "sidecar"


@dataclass(frozen=True)
class Isolation:
    """A plan in two parts.

    Attributes:
        whole: the plan that was cut.
        above: what runs in the sidecar.
        below: what runs in the trainer: a :class:`RemoteStages` under the name of the stage above the cut, and the
            rest.
    """

    whole: Plan
    above: Plan
    below: Plan


def isolate(plan: Plan, kind_of: KindOf) -> Isolation:
    """Cut a plan; raises GraphError if a stage on the trainer's side is not one-to-one."""
    operators = {stage.name: stage.operator for stage in plan.running}
    staying = {n for n, op in operators.items() if op.can(Moves)}
    for stage in plan.running:
        if stage.backend.on_nodes:
            raise GraphError(
                f"isolate=True: stage {stage.name!r} has backend={stage.backend!r}, whose work is in other processes "
                "already; leave out isolate=True"
            )
    plan = _with_pins(plan, staying)
    below: dict[str, StagePlan] = {}
    edge = plan.output
    while staying:
        stage = plan.stages[edge.stage]
        _check(plan, stage, sorted(staying)[0])
        staying.discard(stage.name)
        below[stage.name] = stage
        edge = stage.upstream[0]
    above: dict[str, StagePlan] = {}  # with what the plan left out there, which digests pass over
    for stage in plan.stages.values():
        if stage.name not in below and all(edge.stage in above for edge in stage.spec.upstream):
            above[stage.name] = replace(stage, memory="pageable")
    cut = plan.stages[edge.stage]
    kept = {edge.stage: _remote_stages(cut, kind_of)}
    for stage in reversed(below.values()):
        # Under the stage above the cut there is one queue here, whichever of its outputs is read.
        upstream = (Edge(edge.stage),) if stage.upstream[0] == edge else stage.upstream
        kept[stage.name] = replace(stage, upstream=upstream)
    output = Edge(edge.stage) if not below else plan.output
    return Isolation(
        plan,
        replace(plan, stages=above, output=edge, asked=None),
        replace(plan, stages=kept, output=output, asked=None),
    )


def _with_pins(plan: Plan, staying: set[str]) -> Plan:
    """The plan with the pins that were left out behind pinned slabs which the sidecar writes; they join ``staying``."""
    stages = dict(plan.stages)
    for pin in plan.stages.values():
        mover = pin.operator.can(Moves)
        if pin.bypassed is None or mover is None or mover.moves != "pinned":
            continue
        above = plan.stages[pin.upstream[0].stage]
        if above.memory != "pinned" or _lies_behind(plan, above, staying):
            continue
        stages[pin.name] = replace(pin, bypassed=None, memory="pinned")
        staying.add(pin.name)
        for other in plan.stages.values():
            if other.name != pin.name and any(
                shortcut(e, stages).stage == pin.name for e in other.spec.upstream
            ):
                stages[other.name] = replace(stages[other.name], upstream=(Edge(pin.name),))
    return replace(plan, stages=stages)


def _lies_behind(plan: Plan, stage: StagePlan, names: set[str]) -> bool:
    return stage.name in names or any(
        _lies_behind(plan, plan.stages[edge.stage], names) for edge in stage.upstream
    )


def _check(plan: Plan, stage: StagePlan, mover: str) -> None:
    why = None
    if not stage.kind.in_place:
        why = "is not one-to-one"
    elif stage.caches:
        why = "skips stages that run in the sidecar"
    elif stage.unordered_above:
        why = "finishes in any order (ordered=False), or lies behind a stage that does"
    elif False:
        why = "replaces samples by others, which would have to come from the sidecar"
    elif len(plan.consumers(stage.name)) > 1:
        why = "is read by several stages"
    if why is not None:
        raise GraphError(
            f"isolate=True: stage {stage.name!r} ({stage.operator.name}) {why}, and it stays in the training process "
            f"because {mover!r}, which works on its devices, does; move it before that, or leave out isolate=True"
        )


def _remote_stages(stage: StagePlan, kind_of: KindOf) -> StagePlan:
    operator = RemoteStages()
    capacity = BATCHES_HERE if stage.level == "batch" else min(stage.capacity, SAMPLES_PER_QUEUE)
    return StagePlan(
        StageSpec(stage.name, operator, (), capacity=capacity),
        (),
        workers=1,
        backend=PROCESS,
        capacity=capacity,
        level=stage.level,
        unordered_above=False,
        kind=kind_of(operator),
    )
