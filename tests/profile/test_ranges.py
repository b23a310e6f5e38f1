"""Stages in torch.profiler."""

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError

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


def test_ranges_end_with_their_block_and_begin_before_the_first_pass():
    graph = fan(ops.FromSequence(range(20)))
    with graph.loader() as loader:
        with pg.record(loader, ranges=True):
            before = [batch.tolist() for batch in loader]
        with torch.profiler.profile(experimental_config=EVERYTHING) as profiled:
            assert [batch.tolist() for batch in loader] == before
        assert "left <b>" not in {event.key for event in profiled.key_averages()}
        with pytest.raises(GraphError, match="ranges=True begins before the loader's first pass"):
            pg.record(loader, ranges=True).__enter__()


def test_errors_policies_and_states_are_as_without():
    def fails(x):
        if x % 7 == 3:
            raise ValueError(x)
        return x

    def run(**options):
        graph = pg.Graph("same")
        numbers = graph.add(ops.FromSequence(range(40)), name="numbers")
        numbers.then(fails, name="fails", workers=2, on_error=pg.Skip(10)).then(ops.Batch(4), name="batch")
        with graph.loader() as loader, pg.record(loader, **options):
            first = [batch.tolist() for batch, _ in zip(loader, range(4), strict=False)]
            state = loader.state_dict()
        with graph.loader() as loader, pg.record(loader, **options):
            loader.load_state_dict(state)
            return first, [batch.tolist() for batch in loader], len(loader.profile().quarantined)

    assert run(ranges=True) == run()
