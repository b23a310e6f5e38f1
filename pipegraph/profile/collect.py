"""From a loader's counters to a ``Profile``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pipegraph.contracts import Source
from pipegraph.planning.plan import Plan, StagePlan

from .bottleneck import CONSUMER, EdgeFacts, find_bottleneck, find_lock_holder
from .reports import Report
from .values import MIN_S, Profile, StageProfile

if TYPE_CHECKING:
    from pipegraph.engine.pass_totals import Totals
    from pipegraph.engine.runtime import Runtime
    from pipegraph.loader.loader import Loader


def profile_of(loader: Loader) -> Profile:
    """What the loader has measured so far: before the first pass, during one, after an error or ``close()``."""
    plan, runtime, progress = loader.plan, loader._runtime, loader._progress
    quarantined = loader._ledger.shown()
    if runtime is None:
        stages = {name: StageProfile(workers=_workers(stage)) for name, stage in plan.stages.items()}
        return Profile(stages, CONSUMER, 0.0, 0.0, quarantined, graph=plan.graph_name)
    totals = runtime.pass_totals.totals()
    elapsed_ns = max(1, totals["elapsed",])
    waits = _edge_waits(plan, totals)
    stages = {
        name: _stage(stage, plan, runtime, totals, waits, elapsed_ns) for name, stage in plan.stages.items()
    }
    stall_ns = waits["", 0][0]
    busy = {name: stage.busy + stage.memory for name, stage in stages.items()}
    busy[CONSUMER] = max(0.0, 1 - stall_ns / elapsed_ns)
    elapsed_s = totals["elapsed",] / 1e9
    wake_s = totals["late",] / 1e9 / max(1, totals["wakes",])
    bottleneck = CONSUMER
    holder = None
    if elapsed_s >= MIN_S:
        bottleneck = find_bottleneck(busy, _edges(plan, waits, elapsed_ns))
        threads = {name: stage for name, stage in stages.items() if stage.running is not None}
        occupied = {name: stage.busy * stage.workers for name, stage in threads.items()}
        cores = {name: (stage.running or 0.0) * stage.workers for name, stage in threads.items()}
        holder = find_lock_holder(bottleneck, occupied, cores, wake_s)
    return Profile(
        stages=stages,
        bottleneck=holder or bottleneck,
        lock=holder is not None,
        wake_s=wake_s,
        stall_s=stall_ns / 1e9,
        samples_per_s=progress.samples / elapsed_s if elapsed_s else 0.0,
        quarantined=quarantined,
        graph=plan.graph_name,
        elapsed_s=elapsed_s,
        passes=runtime.pass_totals.passes,
        items=progress.items,
        samples=progress.samples,
        first_batch_s=(progress.first_batch_ns - progress.started_ns) / 1e9
        if progress.first_batch_ns
        else None,
    )


def _workers(stage: StagePlan) -> int:
    return 0 if stage.bypassed is not None else stage.workers


def _producers(plan: Plan) -> dict[tuple[str, int], str]:
    """The stage that feeds each edge ``(consumer, input index)``; ``("", 0)`` is the training loop's."""
    found = {
        (stage.name, index): edge.stage for stage in plan.running for index, edge in enumerate(stage.upstream)
    }
    found["", 0] = plan.output.stage
    return found


def _edge_waits(plan: Plan, totals: Totals) -> dict[tuple[str, int], tuple[float, float]]:
    """``(empty, full)`` of each edge: nanoseconds of its consumer's and its producer's workers.

    Whoever waits for an inline stage drives it: the time that takes is a wait of the consumer.
    """
    producers = _producers(plan)
    fed = Counter(producers.values())
    waits: dict[tuple[str, int], tuple[float, float]] = {}
    driving: dict[str, float] = {}

    def add(consumer: str, index: int) -> None:
        producer = producers[consumer, index]
        empty = totals["get", consumer, index] + driving.get(producer, 0.0) / fed[producer]
        waits[consumer, index] = empty, totals["put", consumer, index]

    for stage in plan.running:
        for index in range(len(stage.upstream)):
            add(stage.name, index)
        if stage.backend == "inline":
            inputs = sum(waits[stage.name, index][0] for index in range(len(stage.upstream)))
            outputs = sum(totals["put", *edge] for edge, name in producers.items() if name == stage.name)
            driving[stage.name] = totals["busy", stage.name] + inputs + outputs
    add("", 0)
    return waits


def _edges(plan: Plan, waits: dict[tuple[str, int], tuple[float, float]], elapsed_ns: int) -> list[EdgeFacts]:
    found = []
    for (consumer, index), producer in _producers(plan).items():
        empty, full = waits[consumer, index]
        consumers = plan.stages[consumer].workers if consumer else 1
        maker = plan.stages[producer]
        found.append(
            EdgeFacts(
                producer,
                consumer or CONSUMER,
                _share(empty, consumers, elapsed_ns),
                _share(full, maker.workers, elapsed_ns),
                maker.backend == "inline",
            )
        )
    return found


def _share(wait_ns: float, workers: int, elapsed_ns: int) -> float:
    # Counters are read while workers write them, so a share may come out a little above the whole.
    return min(1.0, wait_ns / (workers * elapsed_ns))


def _stage(
    stage: StagePlan,
    plan: Plan,
    runtime: Runtime,
    totals: Totals,
    waits: dict[tuple[str, int], tuple[float, float]],
    elapsed_ns: int,
) -> StageProfile:
    if stage.bypassed is not None:
        return StageProfile(within=stage.within)
    name, workers = stage.name, stage.workers
    meters = runtime.meters.get(name, [])
    producers = _producers(plan)
    # A source's call may read a whole group of items.
    per_item = isinstance(stage.operator, Source)
    calls = sum(meter.items if per_item else meter.calls for meter in meters)
    starved = sum(waits[name, index][0] for index in range(len(stage.upstream)))
    memory = totals["memory", name]
    blocked = memory + sum(waits[edge][1] for edge, producer in producers.items() if producer == name)
    reports = {key: made for key, made in runtime.shared(name).items() if isinstance(made, Report)}
    return StageProfile(
        items=sum(meter.items for meter in meters),
        samples=sum(meter.samples for meter in meters),
        nbytes=sum(meter.nbytes for meter in meters),
        rate=totals["items", name] * 1e9 / elapsed_ns,
        service_mean_s=sum(meter.busy_ns for meter in meters) / 1e9 / max(1, calls),
        busy=_share(totals["busy", name], workers, elapsed_ns),
        running=None if stage.backend == "inline" else _share(totals["cpu", name], workers, elapsed_ns),
        starved=_share(starved, workers, elapsed_ns),
        blocked=_share(blocked, workers, elapsed_ns),
        failed=sum(meter.failed for meter in meters),
        retried=sum(meter.retried for meter in meters),
        workers=workers,
        dropped=sum(meter.dropped for meter in meters),
        memory=_share(memory, workers, elapsed_ns),
        grown_to=runtime.grown.get(name),
        counters=dict(runtime.counters.get(name, {})),
        reports={key: report.to_dict() for key, report in reports.items()},
        remarks=tuple(line for report in reports.values() for line in report.lines()),
    )
