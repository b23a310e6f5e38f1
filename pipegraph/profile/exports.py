"""What other programs read: a trace for Perfetto and chrome://tracing, and a profile as OpenMetrics text. Pure.

The trace has one track per worker, and one of training, whose steps name their samples. Its format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (trace-event JSON). Work is a complete
event ("X").

OpenMetrics (https://prometheus.io/docs/specs/om/open_metrics_spec/) is what Prometheus reads; what is in the text is
declared with each measurement. Only the whole life of a loader is written, since counters never fall: rates over time
are the reader's to compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipegraph.engine.tracing import Events
from pipegraph.errors import MissingExtraError
from pipegraph.measurements import in_view

from .bottleneck import CONSUMER
from .values import Profile

SHOWN_SAMPLES = 8
"""Samples that a slice names."""

TRAINING = "training"


def trace_events(events: Events, threads: Mapping[int | None, str], graph: str) -> dict[str, Any]:
    """The trace as JSON.

    Args:
        events: each kind in any order.
        threads: names of the workers' threads by their identity; any other thread goes by its number.
    """
    if not any(events):
        return {"traceEvents": [], "displayTimeUnit": "ms"}
    worked = sorted(events.worked, key=lambda e: e.end_ns)
    steps = sorted(events.delivered, key=lambda e: e.got_ns)
    starts = [e.end_ns - e.took_ns for e in worked] + [e.asked_ns for e in steps]
    zero = min(starts)

    def us(ns: int) -> float:
        return (ns - zero) / 1000

    made: list[dict[str, Any]] = [_event("M", "process_name", 0, args={"name": graph})]
    known = dict.fromkeys([e.thread for e in worked] + [e.thread for e in steps])
    for thread in known:
        trains = any(e.thread == thread for e in steps)
        name = TRAINING if trains else threads.get(thread, f"thread {thread}")
        made.append(_event("M", "thread_name", thread, args={"name": name}))
    made += [_slice(e.stage, e.thread, us(e.end_ns - e.took_ns), e.took_ns / 1000) for e in worked]
    last = max([zero, *(e.end_ns for e in worked), *(e.got_ns for e in steps)])
    asked_next: dict[int, int] = {}
    for step in reversed(steps):
        following = asked_next.get(step.thread, last)
        asked_next[step.thread] = step.asked_ns
        wait_us = (step.got_ns - step.asked_ns) / 1000
        made.append(_slice("wait", step.thread, us(step.asked_ns), wait_us))
        long_us = max(1.0, (following - step.got_ns) / 1000)
        first = [f"{lineage[0]} {lineage[1]}" for lineage in list(step.lineages)[:SHOWN_SAMPLES]]
        shown = {"epoch": step.epoch, "samples": len(step.lineages), "first": first}
        made.append(_slice("step", step.thread, us(step.got_ns), long_us, args=shown))
    return {"traceEvents": made, "displayTimeUnit": "ms"}


def _event(phase: str, name: str, thread: int, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": 1, "tid": thread, **more}


def _slice(name: str, thread: int, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return _event("X", name, thread, cat="work", ts=ts, dur=dur, **args)


# -- OpenMetrics -----------------------------------------------------------------------------------


def render_metrics(profile: Profile) -> str:
    """The text of an exposition, which ends with ``# EOF``.

    Raises:
        MissingExtraError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import Metric
        from prometheus_client.openmetrics.exposition import generate_latest
    except ModuleNotFoundError as missing:
        raise MissingExtraError.of(missing, "prometheus_client", "metrics", "loader.metrics()") from missing
    families: dict[str, Metric] = {}

    def add(record: Any, labels: Mapping[str, str]) -> None:
        for field, each, metric in in_view(type(record), "metric"):
            name, _, quantile = f"pipegraph_{metric}".partition(" ")
            family = name.removesuffix("_total")
            if family not in families:
                kind = "summary" if quantile else "gauge" if family == name else "counter"
                unit = each.unit if family.endswith(f"_{each.unit}") else ""
                about = each.about[0].upper() + each.about[1:].replace("``", "")
                families[family] = Metric(family, about, kind, unit)
            more = {"quantile": quantile} if quantile else {}
            families[family].add_sample(name, {**graph, **labels, **more}, float(getattr(record, field)))

    graph = {"graph": profile.graph}
    running = {name: stage for name, stage in profile.stages.items() if stage.works}
    for name, stage in running.items():
        add(stage, {"stage": name})
    for queue in profile.channels:
        add(queue, {"producer": queue.producer, "consumer": queue.consumer})
    add(profile, {})
    holder = Metric("pipegraph_bottleneck", "Which stage sets the pace.", "stateset")
    for name in (*running, CONSUMER):
        labels = {**graph, "pipegraph_bottleneck": name}
        holder.add_sample("pipegraph_bottleneck", labels, float(name == profile.bottleneck))
    families["pipegraph_bottleneck"] = holder

    class Registry:
        def collect(self) -> list[Metric]:
            return list(families.values())

    text: bytes = generate_latest(Registry())  # type: ignore[no-untyped-call]
    return text.decode()
