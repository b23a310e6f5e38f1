"""Makes a Profile of what a loader has measured. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipegraph.counts import COUNTERS, Edge, Totals
from pipegraph.durations import Durations
from pipegraph.engine.stage.ledger import Quarantined
from pipegraph.errors import GraphError, shown
from pipegraph.measurements import Measured, StageCounts, StageProfile, measurements
from pipegraph.planning.plan import Plan, StagePlan

from .bottleneck import (
    CONSUMER,
    SATURATED,
    Cause,
    EdgeFacts,
    find_bottleneck,
    find_cause,
    find_lock_holder,
    in_bursts,
)
from .values import MIN_S, ChannelProfile, Profile

NEARLY_ALL = 0.8
"""Share of all running that one stage does where it alone can hold the GIL for long."""

MIN_BLOCKED = 0.1
"""Share of its time that a stage waits for room if what follows is slower."""

Waits = dict[Edge, tuple[float, float]]


def profile_of(
    plan: Plan, measured: Measured, quarantined: Sequence[Quarantined], count: int, since: Any = None
) -> Profile:
    """The profile of a loader.

    Args:
        measured: before the first pass nothing.
        quarantined: the last samples that were left out, of ``count`` in all.
        since: an earlier profile of the same loader; only what came after it counts.
    """
    known = measured
    if since is not None:
        names = plan.graph_name, list(plan.stages)
        same = isinstance(since, Profile) and (since.graph, list(since.stages)) == names
        # One that was pickled has no counters any more.
        before = since.measured if same else None
        if not same or (since.items if before is None else before.identity not in (None, measured.identity)):
            raise GraphError(f"since must be an earlier profile of this loader, got {shown(since)}")
        count -= since.quarantined_count
        quarantined = quarantined[max(0, len(quarantined) - count) :]
        if before is not None:
            known = measured.since(before)
    made = _profile(plan, known)
    return replace(made, quarantined=tuple(quarantined), quarantined_count=count, measured=measured)


def _profile(plan: Plan, measured: Measured) -> Profile:
    life, totals = measured.life, measured.passes
    elapsed_ns = max(1, totals["elapsed", ""])
    elapsed_s = totals["elapsed", ""] / 1e9
    waits = _edge_waits(plan, totals)
    stages = {name: _stage(stage, plan, measured, waits, elapsed_ns) for name, stage in plan.stages.items()}
    stall_ns = waits["", 0][0]
    wake_s = _wake_s(measured)
    child_ns = sum(ns for key, ns in life.items() if key[0] == "child_ns")
    cores_used = (totals["process", ""] + child_ns) / elapsed_ns
    edges = _edges(plan, waits, totals, elapsed_ns)
    in_turn = {(edge.producer, edge.consumer) for edge in edges if in_bursts(edge)}
    bottleneck = CONSUMER
    cause: Cause = "unknown"
    if elapsed_s >= MIN_S:
        busy = {name: max(stage.busy, stage.drawing) for name, stage in stages.items()}
        busy[CONSUMER] = max(0.0, 1 - stall_ns / elapsed_ns)
        bottleneck = find_bottleneck(busy, edges)
        bursts = busy[bottleneck] < SATURATED and any(bottleneck in ends for ends in in_turn)
        bottleneck, cause = _cause(plan, stages, bottleneck, wake_s, cores_used, measured.cores)
        if bursts and cause in ("consumer", "stage", "storage"):
            cause = "bursts"
    items, samples = life["items", ""], life["samples", ""]
    took = measured.durations.get("", Durations())
    memory_bytes, memory_peak_bytes, memory_limit = measured.memory
    return Profile(
        stages=stages,
        bottleneck=bottleneck,
        cause=cause,
        stall_s=stall_ns / 1e9,
        samples_per_s=samples / elapsed_s if elapsed_s else 0.0,
        graph=plan.graph_name,
        elapsed_s=elapsed_s,
        passes=life["passes", ""],
        items=items,
        samples=samples,
        first_batch_s=measured.first_batch_s,
        channels=tuple(
            ChannelProfile(
                producer=producer,
                consumer=edge[0] or CONSUMER,
                **measured.queues[edge]._asdict(),
                put_wait_s=totals["put", *edge] / 1e9,
                get_wait_s=totals["get", *edge] / 1e9,
                in_bursts=(producer, edge[0] or CONSUMER) in in_turn,
            )
            for edge, producer in _producers(plan).items()
            if edge in measured.queues
        ),
        step_s=max(0.0, elapsed_s - stall_ns / 1e9) / items if items else 0.0,
        wait_p50_s=took.quantile_s(0.5),
        wait_p90_s=took.quantile_s(0.9),
        wait_p99_s=took.quantile_s(0.99),
        cores_used=cores_used,
        cores=measured.cores,
        memory_bytes=memory_bytes,
        memory_peak_bytes=memory_peak_bytes,
        memory_limit=memory_limit,
        pinned_bytes=sum(
            measured.counters.get(stage.name, {}).get("slab_bytes", 0)
            for stage in plan.running
            if stage.pinned
        ),
        wake_s=wake_s,
    )


def _stage(stage: StagePlan, plan: Plan, measured: Measured, waits: Waits, elapsed_ns: int) -> StageProfile:
    name = stage.name
    if not stage.runs:  # another stage's workers do its work, or it was left out
        return StageProfile(within=stage.within, backend=stage.backend)
    workers = measured.workers.get(name, stage.workers)
    life, passes = measured.of(name)
    counts = StageCounts(
        life=life,
        passes=passes,
        durations=measured.durations.get(name, Durations()),
        elapsed_ns=elapsed_ns,
        worked_ns=passes["worked"] or workers * elapsed_ns,
        starved_ns=sum(waits[name, index][0] for index in range(len(stage.upstream))),
        blocked_ns=sum(waits[edge][1] for edge, producer in _producers(plan).items() if producer == name),
        # A source's call may read a whole group of items.
        pieces=life["items" if stage.source is not None else "calls"],
    )
    computed: dict[str, Any] = {
        field: each.of(counts) if each.of else life[field]
        for field, each in measurements(StageProfile).items()
        if field in COUNTERS or each.of
    }
    if stage.backend.in_consumer:
        computed["running"] = None
    return StageProfile(
        **computed,
        workers=workers,
        backend=stage.backend,
        grown_to=measured.grown.get(name),
        counters=measured.counters.get(name, {}),
        # Why it has no use of more workers, also in another run.
        fixed=stage.backend.why_fixed if stage.backend.in_consumer else stage.kind.fixed(stage.operator),
        remedy=_instead(stage),
        pinned=stage.pinned,
    )


def _cause(
    plan: Plan,
    stages: dict[str, StageProfile],
    bottleneck: str,
    wake_s: float,
    cores_used: float,
    cores: float,
) -> tuple[str, Cause]:
    """The stage to name, and why."""
    # Without what a thread ran outside of its work, such as imports at the start of a short pass.
    in_threads = {
        name: replace(stage, running=min(stage.running, stage.busy))
        for name, stage in stages.items()
        if stage.running is not None and stage.backend.in_trainer
    }
    suspect = bottleneck
    if bottleneck == CONSUMER and in_threads:
        # Training is late as well where a stage holds the lock; that stage never waits for room then.
        most = max(in_threads, key=lambda name: (in_threads[name].running or 0.0) * in_threads[name].workers)
        stage = in_threads[most]
        if (stage.running or 0.0) * stage.workers > NEARLY_ALL * cores_used and stage.blocked < MIN_BLOCKED:
            suspect = most
    holder = find_lock_holder(suspect, in_threads, wake_s)
    if holder is not None:
        return holder, "lock"
    if bottleneck == CONSUMER:
        return CONSUMER, "consumer"
    stage, planned = stages[bottleneck], plan.stages[bottleneck]
    if stage.drawing > stage.busy:  # its sampler's work, not that of its workers
        return bottleneck, "stage"
    reads = planned.source is not None or planned.traits.holds is not None
    return bottleneck, find_cause(stage, reads, cores_used, cores)


def _wake_s(measured: Measured) -> float:
    """Mean seconds between a thread's wake and its next step, without those in which it had no core.

    Threads that mostly wait are without a core right after a wake. What others do, who wait for one in their work, is
    no measure of the GIL.
    """
    late_ns = wakes = 0
    for name in measured.workers:
        late_ns += max(0, measured.passes["late_ns", name] - measured.life["coreless_ns", name])
        wakes += measured.passes["wakes", name]
    return late_ns / 1e9 / max(1, wakes)


def _producers(plan: Plan) -> dict[Edge, str]:
    """The stage that feeds each edge ``(consumer, input index)``; ``("", 0)`` is the training loop's."""
    found = {
        (stage.name, index): edge.stage for stage in plan.running for index, edge in enumerate(stage.upstream)
    }
    found["", 0] = plan.output.stage
    return found


def _edge_waits(plan: Plan, totals: Totals) -> Waits:
    """``(empty, full)`` of each edge: nanoseconds of its consumer's and its producer's workers.

    A thread that waits for an inline stage runs it: the time that takes counts as a wait of the consumer.
    """
    producers = _producers(plan)
    fed = Counter(producers.values())
    waits: Waits = {}
    driving: dict[str, float] = {}

    def add(consumer: str, index: int) -> None:
        producer = producers[consumer, index]
        empty = totals["get", consumer, index] + driving.get(producer, 0.0) / fed[producer]
        waits[consumer, index] = empty, totals["put", consumer, index]

    for stage in plan.running:
        for index in range(len(stage.upstream)):
            add(stage.name, index)
        if stage.backend.in_consumer:
            inputs = sum(waits[stage.name, index][0] for index in range(len(stage.upstream)))
            outputs = sum(totals["put", *edge] for edge, name in producers.items() if name == stage.name)
            driving[stage.name] = totals["busy_ns", stage.name] + inputs + outputs
    add("", 0)
    return waits


def _edges(plan: Plan, waits: Waits, totals: Totals, elapsed_ns: int) -> list[EdgeFacts]:
    def worked(name: str) -> int:
        return totals["worked", name] or plan.stages[name].workers * elapsed_ns

    return [
        EdgeFacts(
            producer,
            consumer or CONSUMER,
            min(1.0, waits[consumer, index][0] / (worked(consumer) if consumer else elapsed_ns)),
            min(1.0, waits[consumer, index][1] / worked(producer)),
            plan.stages[producer].backend.in_consumer,
        )
        for (consumer, index), producer in _producers(plan).items()
    ]


def _instead(stage: StagePlan) -> str:
    """What helps a stage that has no use of more workers."""
    if stage.backend.in_consumer:
        return 'backend="thread"'
    if stage.kind.fixed(stage.operator) is None:
        return ""
    if stage.source is not None:
        return (
            "a random-access source (FromSequence over a dataset with __getitem__), or a source that only names what "
            "to read, and reading in a stage behind it"
        )
    if stage.kind.gathers:
        return "work on samples (decoding, converting, padding) in the stage above, which may have several workers"
    if stage.work.stateful:
        return "a stage without a state for its expensive part"
    return "its expensive part in a stage of its own, which may have several workers"
