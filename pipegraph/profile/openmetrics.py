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
    running = [(name, stage) for name, stage in profile.stages.items() if stage.workers]

    def stages(name: str, kind: str, about: str, values: Iterable[float], unit: str = "") -> Metric:
        suffix = "_total" if kind == "counter" else ""
        samples = tuple(
            (suffix, {**graph, "stage": stage}, value)
            for (stage, _), value in zip(running, values, strict=True)
        )
        return Metric(f"pipegraph_stage_{name}", kind, about, samples, unit)

    def loader(name: str, kind: str, about: str, value: float, unit: str = "") -> Metric:
        suffix = "_total" if kind == "counter" else ""
        return Metric(f"pipegraph_{name}", kind, about, ((suffix, graph, value),), unit)

    made = [stage for _, stage in running]
    yield stages("items", "counter", "Chunks that the stage sent.", [s.items for s in made])
    yield stages("samples", "counter", "Samples in them.", [s.samples for s in made])
    yield stages("made_bytes", "counter", "Bytes of data that it made.", [s.nbytes for s in made], "bytes")
    yield stages("failed", "counter", "Items that failed.", [s.failed for s in made])
    yield stages("retried", "counter", "Tries after the first.", [s.retried for s in made])
    yield stages("dropped", "counter", "Items that it sent nothing for.", [s.dropped for s in made])
    yield stages("workers", "gauge", "Workers.", [s.workers for s in made])
    for state in ("busy", "starved", "blocked"):
        yield stages(
            f"{state}_ratio",
            "gauge",
            f"Share of its workers' time that they were {state}.",
            [getattr(stage, state) for stage in made],
            "ratio",
        )
    quantiles = (("0.5", "service_p50_s"), ("0.9", "service_p90_s"), ("0.99", "service_p99_s"))
    yield Metric(
        "pipegraph_stage_service_seconds",
        "summary",
        "How long one piece of work took.",
        tuple(
            ("", {**graph, "stage": name, "quantile": quantile}, getattr(stage, field))
            for name, stage in running
            for quantile, field in quantiles
        ),
        "seconds",
    )
    for field in ("depth", "capacity"):
        yield Metric(
            f"pipegraph_channel_{field}",
            "gauge",
            f"The queue's {field} in items.",
            tuple(
                (
                    "",
                    {**graph, "producer": each.producer, "consumer": each.consumer},
                    getattr(each, field),
                )
                for each in profile.channels
            ),
        )
    yield loader("items", "counter", "Chunks delivered.", profile.items)
    yield loader("samples", "counter", "Samples delivered.", profile.samples)
    yield loader("running_seconds", "counter", "Time that passes ran.", profile.elapsed_s, "seconds")
    yield loader(
        "stall_seconds", "counter", "Time that training waited for data.", profile.stall_s, "seconds"
    )
    yield Metric(
        "pipegraph_wait_seconds",
        "summary",
        "How long training waited for a chunk.",
        tuple(
            ("", {**graph, "quantile": quantile}, value)
            for quantile, value in (
                ("0.5", profile.wait_p50_s),
                ("0.9", profile.wait_p90_s),
                ("0.99", profile.wait_p99_s),
            )
        ),
        "seconds",
    )
    yield loader("memory_bytes", "gauge", "Bytes that chunks hold.", profile.memory_bytes, "bytes")
    yield loader("memory_limit_bytes", "gauge", "Bytes they may hold.", profile.memory_limit, "bytes")
    yield loader("pinned_bytes", "gauge", "Pinned memory of stages.", profile.pinned_bytes, "bytes")
    yield loader("quarantined", "counter", "Samples left out or replaced.", len(profile.quarantined))
    holders = [name for name, _ in running] + [CONSUMER]
    yield Metric(
        "pipegraph_bottleneck",
        "stateset",
        "Which stage sets the pace.",
        tuple(
            ("", {**graph, "pipegraph_bottleneck": name}, float(name == profile.bottleneck))
            for name in holders
        ),
    )


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
