"""A profile as OpenMetrics text, which Prometheus reads; what is in it is declared with each measurement.

The format: https://prometheus.io/docs/specs/om/open_metrics_spec/. Only the whole life of a loader is written, since
counters never fall: rates over time are the reader's to compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipegraph.errors import MissingExtraError
from pipegraph.measurements import in_view

from .bottleneck import CONSUMER
from .values import Profile


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
                families[family] = Metric(family, _help(each.about), kind, unit)
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


def _help(about: str) -> str:
    return about[0].upper() + about[1:].replace("``", "")
