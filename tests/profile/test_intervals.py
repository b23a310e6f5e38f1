"""Profiles of intervals, what a recording sees, and headspace."""

import json
import threading
from dataclasses import replace

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


def test_headspace_is_the_step_without_the_loader(monkeypatch):
    clock = iter([0.0, 0.06, 1.0, 1.006])  # as six steps with the loader begin and end, and six without
    monkeypatch.setattr("pipegraph.profile.record.perf_counter", lambda: next(clock))
    graph = pg.Graph("slow")
    graph.add(ops.FromIterable(range(12)), name="source")
    seen = []
    with graph.loader() as loader:
        found = loader.headspace(seen.append, batches=3, steps=6)
        assert list(loader) == list(range(12))
    assert seen[:3] == [0, 1, 2] and seen[-6:] == [0, 1, 2, 0, 1, 2]
    assert found.steps == 6
    assert (found.step_s, found.replayed_step_s) == pytest.approx((0.01, 0.001))
    assert found.gain == pytest.approx(9)
    assert "more than 900 % faster" in str(found)
    assert "more than 103 times as fast" in str(replace(found, step_s=1.03, replayed_step_s=0.01))
