"""Profiles of intervals, and what a recording sees."""

import json
import threading

import pytest
from channel_states import wait_until

import pipegraph as pg
from pipegraph import operators as ops


def chain(items=30, name="chain"):
    graph = pg.Graph(name)
    graph.add(ops.FromIterable(range(items)), name="source").then(lambda x: x + 1, name="add")
    return graph


def test_an_interval_counts_what_came_after_the_earlier_profile():
    with chain().loader() as loader:
        list(loader)
        first = loader.profile()
        list(loader)
        second = loader.profile(since=first)
        list(loader)
        third = loader.profile(since=first)
    assert (first.items, second.items, third.items) == (30, 30, 60)
    assert second.stages["add"].items == 30 and third.stages["add"].samples == 60
    assert third.passes == 2
    assert third.elapsed_s == pytest.approx(loader.profile().elapsed_s - first.elapsed_s)


def test_percentiles_and_channels_are_in_the_profile():
    never = threading.Event()

    def work(x):
        wait_until(loader._crew.run.terminal, lambda stats: stats.getters_waiting == 1)
        never.wait(0.004)  # from here on the consumer waits, too
        return x

    graph = pg.Graph("costs")
    source = graph.add(ops.FromIterable(range(20)), name="source")
    source.then(work, name="work", capacity=3)
    with graph.loader() as loader:
        list(loader)
        found = loader.profile()
    assert 0.0039 <= found.stages["work"].service_p50_s <= found.stages["work"].service_p99_s
    last = found.channels[-1]
    assert (last.producer, last.consumer, last.capacity, last.depth) == ("work", "consumer", 3, 0)
    assert last.get_wait_s > 0.05
    assert json.loads(found.to_json())["channels"][-1]["consumer"] == "consumer"
    assert found.wait_p50_s > 0.003
    assert repr(found).startswith("<Profile costs: ")


def test_a_profile_gives_numbers_to_loggers_and_a_recording_ends_its_thread():
    with chain(2000).loader() as loader, pg.record(loader, every=0.05):
        assert any(thread.name == "pipegraph-recorder" for thread in threading.enumerate())
        assert len(list(loader)) == 2000
    assert loader.profile().scalars()["add/workers"] == 1.0
    assert not any(thread.name == "pipegraph-recorder" for thread in threading.enumerate())
