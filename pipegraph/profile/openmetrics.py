"""A profile as OpenMetrics text, which Prometheus reads, and as plain numbers for loggers.

The format: https://prometheus.io/docs/specs/om/open_metrics_spec/. Only the whole life of a loader is written, since
counters never fall: rates over time are the reader's to compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .bottleneck import CONSUMER
from .values import Profile

Labels = Mapping[str, str]

QUANTILES = (("0.5", "p50_s"), ("0.9", "p90_s"), ("0.99", "p99_s"))
"""As OpenMetrics writes them, and as a profile's fields end."""


@dataclass(frozen=True)
class Metric:
    """One family: its name without the suffix, its kind, unit and help, and samples ``(suffix, labels, value)``."""

    name: str
    kind: str
    help: str
    samples: tuple[tuple[str, Labels, float], ...]
    unit: str = ""


def render_metrics(profile: Profile) -> str:
    """The text of an exposition, which ends with ``# EOF``."""
    lines: list[str] = []
    for metric in _families(profile):
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        if metric.unit:
            lines.append(f"# UNIT {metric.name} {metric.unit}")
        lines.append(f"# HELP {metric.name} {_escaped(metric.help)}")
        for suffix, labels, value in metric.samples:
            inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            lines.append(f"{metric.name}{suffix}{{{inside}}} {value!r}")
    return "\n".join([*lines, "# EOF", ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _families(profile: Profile) -> Iterable[Metric]:
    graph = {"graph": profile.graph}
    running = {name: stage for name, stage in profile.stages.items() if stage.workers}

    def metric(
        name: str, kind: str, about: str, values: Iterable[tuple[Labels, float]], unit: str = ""
    ) -> Metric:
        suffix = "_total" if kind == "counter" else ""
        samples = tuple((suffix, {**graph, **labels}, value) for labels, value in values)
        return Metric(f"pipegraph_{name}", kind, about, samples, unit)

    def stages(name: str, kind: str, about: str, field: str, unit: str = "") -> Metric:
        values = [({"stage": each}, getattr(stage, field)) for each, stage in running.items()]
        return metric(f"stage_{name}", kind, about, values, unit)

    def loader(name: str, kind: str, about: str, value: float, unit: str = "") -> Metric:
        return metric(name, kind, about, [({}, value)], unit)

    yield stages("items", "counter", "Chunks that the stage sent.", "items")
    yield stages("samples", "counter", "Samples in them.", "samples")
    yield stages("made_bytes", "counter", "Bytes of data that it made.", "nbytes", "bytes")
    yield stages("failed", "counter", "Items that failed.", "failed")
    yield stages("retried", "counter", "Tries after the first.", "retried")
    yield stages("dropped", "counter", "Items that it sent nothing for.", "dropped")
    yield stages("workers", "gauge", "Workers.", "workers")
    for state in ("busy", "starved", "blocked"):
        about = f"Share of its workers' time that they were {state}."
        yield stages(f"{state}_ratio", "gauge", about, state, "ratio")
    services = [
        ({"stage": name, "quantile": quantile}, getattr(stage, f"service_{field}"))
        for name, stage in running.items()
        for quantile, field in QUANTILES
    ]
    yield metric("stage_service_seconds", "summary", "How long one piece of work took.", services, "seconds")
    for field in ("depth", "capacity"):
        queues = [
            ({"producer": each.producer, "consumer": each.consumer}, getattr(each, field))
            for each in profile.channels
        ]
        yield metric(f"channel_{field}", "gauge", f"The queue's {field} in items.", queues)
    yield loader("items", "counter", "Chunks delivered.", profile.items)
    yield loader("samples", "counter", "Samples delivered.", profile.samples)
    yield loader("running_seconds", "counter", "Time that passes ran.", profile.elapsed_s, "seconds")
    yield loader(
        "stall_seconds", "counter", "Time that training waited for data.", profile.stall_s, "seconds"
    )
    waits = [({"quantile": quantile}, getattr(profile, f"wait_{field}")) for quantile, field in QUANTILES]
    yield metric("wait_seconds", "summary", "How long training waited for a chunk.", waits, "seconds")
    yield loader("memory_bytes", "gauge", "Bytes that chunks hold.", profile.memory_bytes, "bytes")
    yield loader("memory_limit_bytes", "gauge", "Bytes they may hold.", profile.memory_limit, "bytes")
    yield loader("pinned_bytes", "gauge", "Pinned memory of stages.", profile.pinned_bytes, "bytes")
    yield loader("quarantined", "counter", "Samples left out or replaced.", profile.quarantined_count)
    holders = [
        ({"pipegraph_bottleneck": name}, float(name == profile.bottleneck)) for name in [*running, CONSUMER]
    ]
    yield metric("bottleneck", "stateset", "Which stage sets the pace.", holders)


def scalars(profile: Profile) -> dict[str, float]:
    """See :meth:`pipegraph.profile.Profile.scalars`."""
    found = {
        "samples_per_s": profile.samples_per_s,
        "stall_s": profile.stall_s,
        "stall_share": profile.stall_s / profile.elapsed_s if profile.elapsed_s else 0.0,
        "step_s": profile.step_s,
        "wait_p99_s": profile.wait_p99_s,
        "memory_bytes": float(profile.memory_bytes),
        "cores_used": profile.cores_used,
    }
    for name, stage in profile.stages.items():
        if stage.workers:
            found[f"{name}/items_per_s"] = stage.rate
            found[f"{name}/service_p50_s"] = stage.service_p50_s
            found[f"{name}/busy"] = stage.busy
            found[f"{name}/starved"] = stage.starved
            found[f"{name}/blocked"] = stage.blocked
            found[f"{name}/workers"] = float(stage.workers)
    return found
