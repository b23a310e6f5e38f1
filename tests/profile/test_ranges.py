"""Stages in torch.profiler."""

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops

EVERYTHING = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


def ranges_of(graph, **options):
    with (
        graph.loader() as loader,
        pg.record(loader, **options),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=EVERYTHING
        ) as profiled,
    ):
        items = list(loader)
    return items, {event.key: event.count for event in profiled.key_averages()}


def fan(source):
    graph = pg.Graph("ranged")
    read = graph.add(source, name="read")
    left = read.then(lambda x: torch.ones(4) * x, name="left <b>", workers=2)
    right = read.then(ops.Filter(lambda x: True), name="right")
    both = graph.add(ops.Zip(), left, right, name="both").then(
        lambda pair: pair[0], name="inline", backend="inline"
    )
    both.then(ops.Batch(5), name="batch")
    return graph


@pytest.mark.parametrize("source", [ops.FromSequence, ops.FromIterable])
def test_every_stage_is_a_range_under_its_name_and_operations_are_within(source):
    items, ranges = ranges_of(fan(source(range(20))), ranges=True)
    assert len(items) == 4
    assert {"read", "left <b>", "right", "both", "inline", "batch"} <= set(ranges)
    assert ranges["aten::mul"] == 20


def test_without_being_asked_for_there_are_none_and_operators_are_left_alone():
    items, ranges = ranges_of(fan(ops.FromSequence(range(20))))
    assert len(items) == 4
    assert not {"read", "left <b>", "right", "both", "inline", "batch"} & set(ranges)
