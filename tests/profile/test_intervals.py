"""Profiles of intervals, what a recording sees, and headspace."""

import json
import logging
import threading
from dataclasses import replace

import pytest
from channel_states import wait_until

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, GraphError


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
    assert sum(count for _, count in third.waits) == 60


def test_an_earlier_profile_of_before_the_first_pass_leaves_everything():
    with chain().loader() as loader:
        before = loader.profile()
        list(loader)
        assert loader.profile(since=before).items == 30


def test_a_profile_of_another_graph_is_refused():
    with chain().loader() as loader, chain(name="other").loader() as other:
        list(loader)
        list(other)
        with pytest.raises(GraphError, match="an earlier profile of this loader"):
            loader.profile(since=other.profile())


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
    assert "work" in found._repr_html_()


def test_a_recording_gives_numbers_to_a_logger_and_ends_its_thread():
    logged = []
    with (
        chain(2000).loader() as loader,
        pg.record(loader, log=lambda numbers, step: logged.append((step, numbers)), every=0.05),
    ):
        assert any(thread.name == "pipegraph-recorder" for thread in threading.enumerate())
        assert len(list(loader)) == 2000
    assert logged[-1][0] == 2000 and logged[-1][1]["add/workers"] == 1.0
    assert not any(thread.name == "pipegraph-recorder" for thread in threading.enumerate())


def test_a_logger_that_raises_is_called_no_more_and_training_goes_on(caplog):
    calls = []

    def log(numbers, step):
        calls.append(step)
        raise ValueError("full disk")

    called = threading.Event()

    def wait(x):
        if x == 1:
            called.wait(0.2)
        return x

    graph = pg.Graph("raising")
    graph.add(ops.FromIterable(range(3)), name="source").then(wait, name="wait")
    with (
        caplog.at_level(logging.ERROR, "pipegraph"),
        graph.loader() as loader,
        pg.record(loader, log=log, every=0.05),
    ):
        assert list(loader) == [0, 1, 2]
    assert len(calls) == 1
    assert "log= raised" in caplog.text


def test_a_recording_refuses_what_it_cannot_do():
    with chain().loader() as loader:
        with pytest.raises(GraphError, match=r"every \(seconds\) must be a number >= 0\.05, got 0"):
            pg.record(loader, every=0)
        recording = pg.record(loader)
        with recording:
            pass
        with pytest.raises(GraphError, match="one with block"), recording:
            pass


def test_headspace_is_the_step_without_the_loader(monkeypatch):
    clock = iter([0.0, 0.06, 1.0, 1.006])  # as six steps with the loader begin and end, and six without
    monkeypatch.setattr("pipegraph.profile.headspace.perf_counter", lambda: next(clock))
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


def test_headspace_goes_on_into_further_epochs_and_says_when_there_is_nothing():
    with chain(4).loader() as loader:
        assert loader.headspace(lambda batch: None, batches=2, steps=20).steps == 20
        with pytest.raises(GraphError, match="batches must be an int >= 1, got 0"):
            loader.headspace(lambda batch: None, batches=0, steps=5)
    with chain(0).loader() as empty, pytest.raises(DataError, match="delivered nothing"):
        empty.headspace(lambda batch: None)
