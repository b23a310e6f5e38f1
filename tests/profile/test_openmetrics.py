"""The text that Prometheus scrapes, read with its own parser; and plain numbers for loggers."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import pipegraph as pg
from pipegraph import operators as ops

HOSTILE = 'a "quoted"\\ name\nof two lines, {braces}'


@pytest.fixture
def loader():
    graph = pg.Graph("graph " + HOSTILE)
    graph.add(ops.FromIterable(range(40)), name="source").then(lambda x: x, name=HOSTILE, workers=2)
    with graph.loader() as loader:
        yield loader


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_counters_are_those_of_the_profile_under_escaped_names(loader):
    list(loader)
    found = families(loader.metrics())
    items = {sample.labels["stage"]: sample.value for sample in found["pipegraph_stage_items"].samples}
    assert items == {"source": 40, HOSTILE: 40}
    assert found["pipegraph_samples"].samples[0].value == 40
    assert found["pipegraph_samples"].samples[0].labels == {"graph": "graph " + HOSTILE}
    holders = [s.labels["pipegraph_bottleneck"] for s in found["pipegraph_bottleneck"].samples if s.value]
    assert len(holders) == 1
    services = found["pipegraph_stage_service_seconds"].samples
    assert {sample.labels["quantile"] for sample in services} == {"0.5", "0.9", "0.99"}


def test_counters_never_fall_from_pass_to_pass(loader):
    before = families(loader.metrics())
    list(loader)
    middle = families(loader.metrics())
    list(loader)
    after = families(loader.metrics())
    for name, family in after.items():
        if family.type == "counter":
            for earlier, later in ((before, middle), (middle, after)):
                old = {tuple(sorted(s.labels.items())): s.value for s in earlier[name].samples}
                assert all(s.value >= old[tuple(sorted(s.labels.items()))] for s in later[name].samples), name
