"""Makes a Profile of a loader's counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from pipegraph.contracts import Source
from pipegraph.errors import GraphError
from pipegraph.planning.plan import Plan, StagePlan

from .bottleneck import (
    CONSUMER,
    Cause,
    EdgeFacts,
    StageFacts,
    find_bottleneck,
    find_cause,
    find_lock_holder,
)
from .measured import Measured, measure
from .values import MIN_S, ChannelProfile, Profile, StageProfile, run_busy, run_of

if TYPE_CHECKING:
    from pipegraph.engine.pass_totals import Totals
    from pipegraph.loader.loader import Loader

NEARLY_ALL = 0.8
"""Share of all running that one stage does where it alone can hold the interpreter lock for long."""

MIN_BLOCKED = 0.1
"""Share of its time that a stage waits for room if what follows is slower."""

Edge = tuple[str, int]
Waits = dict[Edge, tuple[float, float]]


def profile_of(loader: Loader, since: Profile | None = None) -> Profile:
    """What the loader has measured: before the first pass, during one, after an error or ``close()``.

    Args:
        since: an earlier profile of the same loader; only what came after it counts.
    """
    plan, runtime, progress = loader.plan, loader._runtime, loader._progress
    quarantined, count = loader._ledger.shown()
    if since is not None and not isinstance(since, Profile):
        raise GraphError(f"since must be an earlier profile of this loader, got {since!r}")
    if runtime is None:
        stages = {
            name: StageProfile(workers=stage.workers if stage.bypassed is None else 0, backend=stage.backend)
            for name, stage in plan.stages.items()
        }
        return Profile(stages, CONSUMER, 0.0, 0.0, quarantined, count, graph=plan.graph_name)
    measured = known = measure(loader, runtime)
    if since is not None:
        # One that was pickled has no counters any more.
        other = (
            bool(since.items) if since.measured is None else since.measured.identity is not measured.identity
        )
        if other or since.graph != plan.graph_name or list(since.stages) != list(plan.stages):
            raise GraphError(f"since must be an earlier profile of this loader, got {since!r}")
        count -= since.quarantined_count
        quarantined = quarantined[max(0, len(quarantined) - count) :]
        if since.measured is not None:
            known = measured.since(since.measured)
    first = None
    if progress.first_batch_ns:
        first = (progress.first_batch_ns - progress.started_ns) / 1e9
    made = _profile(plan, known)
    grown = {name: replace(stage, grown_to=runtime.grown.get(name)) for name, stage in made.stages.items()}
    return replace(
        made,
        stages=grown,
        quarantined=quarantined,
        quarantined_count=count,
        first_batch_s=first,
        measured=measured,
    )


def _profile(plan: Plan, measured: Measured) -> Profile:
    totals = measured.totals
    elapsed_ns = max(1, totals["elapsed",])
    elapsed_s = totals["elapsed",] / 1e9
    waits = _edge_waits(plan, totals)
    stages = {name: _stage(stage, plan, measured, waits, elapsed_ns) for name, stage in plan.stages.items()}
    stall_ns = waits["", 0][0]
    wake_s = _wake_s(measured)
    cores_used = measured.process_ns / elapsed_ns
    bottleneck = CONSUMER
    cause: Cause = "unknown"
    if elapsed_s >= MIN_S:
        busy = {name: run_busy(stages, name) + stage.memory for name, stage in stages.items()}
        busy[CONSUMER] = max(0.0, 1 - stall_ns / elapsed_ns)
        bottleneck = find_bottleneck(busy, _edges(plan, waits, totals, elapsed_ns))
        bottleneck, cause = _cause(plan, stages, bottleneck, wake_s, cores_used, measured.cores)
        # Of a run of stages that share their processes, the one that takes longest.
        bottleneck = max(run_of(stages, bottleneck), key=lambda name: stages[name].busy, default=bottleneck)
    pinned = sum(
        measured.stages[stage.name].counters.get("slab_bytes", 0)
        for stage in plan.running
        if stage.memory == "pinned"
    )
    return Profile(
        stages=stages,
        bottleneck=bottleneck,
        cause=cause,
        stall_s=stall_ns / 1e9,
        samples_per_s=measured.samples / elapsed_s if elapsed_s else 0.0,
        quarantined=(),
        quarantined_count=0,
        graph=plan.graph_name,
        elapsed_s=elapsed_s,
        passes=measured.passes,
        items=measured.items,
        samples=measured.samples,
        channels=tuple(_channels(plan, measured)),
        step_s=max(0.0, elapsed_s - stall_ns / 1e9) / measured.items if measured.items else 0.0,
        wait_p50_s=measured.waits.quantile_s(0.5),
        wait_p90_s=measured.waits.quantile_s(0.9),
        wait_p99_s=measured.waits.quantile_s(0.99),
        waits=tuple(measured.waits.bins()),
        cores_used=cores_used,
        cores=measured.cores,
        memory_bytes=measured.memory[0],
        memory_peak_bytes=measured.memory[1],
        memory_limit=measured.memory[2],
        pinned_bytes=pinned,
        wake_s=wake_s,
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
    threads = {name: stage for name, stage in stages.items() if stage.running is not None}
    in_threads = {name: stage for name, stage in threads.items() if stage.backend.in_trainer}
    suspect = bottleneck
    if bottleneck == CONSUMER and in_threads:
        # Training is late as well where a stage holds the lock; that stage never waits for room then.
        most = max(in_threads, key=lambda name: (in_threads[name].running or 0.0) * in_threads[name].workers)
        stage = in_threads[most]
        if (stage.running or 0.0) * stage.workers > NEARLY_ALL * cores_used and stage.blocked < MIN_BLOCKED:
            suspect = most
    holder = find_lock_holder(
        suspect,
        {name: stage.busy * stage.workers for name, stage in in_threads.items()},
        {name: (stage.running or 0.0) * stage.workers for name, stage in in_threads.items()},
        {name: stage.coreless * stage.workers for name, stage in in_threads.items()},
        wake_s,
    )
    if holder is not None:
        return holder, "lock"
    if bottleneck == CONSUMER:
        return CONSUMER, "consumer"
    stage, operator = stages[bottleneck], plan.stages[bottleneck].operator
    many = stage.workers
    facts = StageFacts(
        busy=run_busy(stages, bottleneck) * many,
        running=(stage.running or 0.0) * many,
        coreless=stage.coreless * many,
        memory=stage.memory * many,
        reads=isinstance(operator, Source) or operator.reads,
    )
    return bottleneck, find_cause(facts, cores_used, cores)


def _wake_s(measured: Measured) -> float:
    """Mean seconds between a thread's wake and its next step, without those in which it had no core.

    Threads that mostly wait are without a core right after a wake. What others do, who wait for one in their work, is
    no measure of the interpreter lock.
    """
    late_ns = wakes = 0
    for name, counts in measured.stages.items():
        late_ns += max(0, measured.totals["late", name] - counts.coreless_ns)
        wakes += measured.totals["wakes", name]
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
            driving[stage.name] = totals["busy", stage.name] + inputs + outputs
    add("", 0)
    return waits


def _edges(plan: Plan, waits: Waits, totals: Totals, elapsed_ns: int) -> list[EdgeFacts]:
    def worked(name: str) -> int:
        return totals["worked", name] or plan.stages[name].workers * elapsed_ns

    return [
        EdgeFacts(
            producer,
            consumer or CONSUMER,
            _share(waits[consumer, index][0], worked(consumer) if consumer else elapsed_ns),
            _share(waits[consumer, index][1], worked(producer)),
            plan.stages[producer].backend.in_consumer,
        )
        for (consumer, index), producer in _producers(plan).items()
    ]


def _channels(plan: Plan, measured: Measured) -> list[ChannelProfile]:
    totals, looks = measured.totals, measured.channels
    return [
        ChannelProfile(
            producer=producer,
            consumer=edge[0] or CONSUMER,
            capacity=looks[edge].capacity,
            depth=looks[edge].depth,
            nbytes=looks[edge].nbytes,
            put_wait_s=totals["put", *edge] / 1e9,
            get_wait_s=totals["get", *edge] / 1e9,
        )
        for edge, producer in _producers(plan).items()
        if edge in looks
    ]


def _share(wait_ns: float, worked_ns: int) -> float:
    # Counters are read while workers write them, so a share may come out a little above the whole.
    return min(1.0, wait_ns / worked_ns)


def _stage(stage: StagePlan, plan: Plan, measured: Measured, waits: Waits, elapsed_ns: int) -> StageProfile:
    name, totals = stage.name, measured.totals
    counts = measured.stages.get(name)
    if counts is None:
        return StageProfile(within=stage.within)
    within = stage.bypassed is not None  # another stage's workers do its work
    workers = stage.workers if within else measured.workers.get(name, stage.workers)
    worked_ns = totals["worked", name] or workers * elapsed_ns
    # A source's call may read a whole group of items.
    calls = counts.items if isinstance(stage.operator, Source) and not within else counts.calls
    found = StageProfile(
        items=counts.items,
        samples=counts.samples,
        nbytes=counts.nbytes,
        rate=totals["items", name] * 1e9 / elapsed_ns,
        service_mean_s=counts.busy_ns / 1e9 / max(1, calls),
        service_p50_s=counts.durations.quantile_s(0.5),
        service_p90_s=counts.durations.quantile_s(0.9),
        service_p99_s=counts.durations.quantile_s(0.99),
        busy=_share(totals["busy", name], worked_ns),
        backend=stage.backend,
        failed=counts.failed,
        dropped=counts.dropped,
        counters=counts.counters,
        within=stage.within,
    )
    if within:
        return found
    starved = sum(waits[name, index][0] for index in range(len(stage.upstream)))
    memory = totals["memory", name]
    blocked = memory + sum(waits[edge][1] for edge, producer in _producers(plan).items() if producer == name)
    ran = totals["cpu", name] + counts.child_ns
    return replace(
        found,
        running=None if stage.backend.in_consumer else _share(ran, worked_ns),
        coreless=_share(counts.coreless_ns, worked_ns),
        starved=_share(starved, worked_ns),
        blocked=_share(blocked, worked_ns),
        retried=counts.retried,
        workers=workers,
        memory=_share(memory, worked_ns),
        reports={key: report.to_dict() for key, report in counts.reports.items()},
        remarks=tuple(line for report in counts.reports.values() for line in report.lines()),
    )
