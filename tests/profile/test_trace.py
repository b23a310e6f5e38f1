"""Traces: valid nesting on every track, and samples that can be followed from their source to their step."""

import gc
import json
import threading
from collections import defaultdict

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.chunk import Chunk
from pipegraph.engine.tracing import Events, Tracer
from pipegraph.profile.trace import trace_events


@pytest.fixture
def trace(tmp_path):
    never = threading.Event()
    graph = pg.Graph('traced "graph"')
    source = graph.add(ops.FromSequence(range(40)), name="read", workers=2)
    node = source.then(lambda x: never.wait(0.001) or x, name="decode <b>", workers=3)
    node = node.then(lambda x: x, name="inline", backend="inline").then(ops.Batch(4), name="batch")
    path = tmp_path / "trace.json"
    with graph.loader() as loader, pg.record(loader, trace=path):
        assert len(list(loader)) == 10
    return json.loads(path.read_text())["traceEvents"]


def test_slices_of_a_track_never_overlap_halfway(trace):
    tracks = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
            tracks[event["tid"]].append((event["ts"], -event["dur"]))
    assert len(tracks) >= 4
    for slices in tracks.values():
        open_until = []
        for start, negative in sorted(slices):
            while open_until and open_until[-1] <= start + 0.002:  # numbers are rounded to a nanosecond
                open_until.pop()
            assert not open_until or start - negative <= open_until[-1] + 0.002
            open_until.append(start - negative)


def test_every_worker_that_worked_has_a_named_track(trace):
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    tracks = {event["tid"] for event in trace if event["ph"] == "X"}
    assert set(names) == tracks
    assert len(set(names.values())) == len(names)
    stages = {name.rpartition(" ")[0] or name for name in names.values()}
    assert stages == {"training", "read", "decode <b>", "batch"}


def test_a_sample_is_followed_from_its_source_to_its_step(trace):
    slices = [event for event in trace if event["ph"] == "X"]

    def around(flow):
        return {
            each["name"]
            for each in slices
            if each["tid"] == flow["tid"]
            and each["ts"] - 0.01 <= flow["ts"] <= each["ts"] + each["dur"] + 0.01
        }

    flows = defaultdict(list)
    for event in trace:
        if event["cat" if "cat" in event else "ph"] == "sample":
            flows[event["id"]].append(event)
    assert len(flows) == 10
    for events in flows.values():
        assert [each["ph"] for each in events] == ["s", *"t" * (len(events) - 2), "f"]
        assert "read" in around(events[0])
        assert any("decode <b>" in around(each) for each in events[1:-1])
        assert "step" in around(events[-1])
        assert [each["ts"] for each in events] == sorted(each["ts"] for each in events)


def test_tracing_costs_nothing_once_it_is_off_and_nothing_traced_is_a_valid_trace():
    assert trace_events(Events(), {}, "empty") == {"traceEvents": [], "displayTimeUnit": "ms"}
    graph = pg.Graph("off")
    graph.add(ops.FromIterable(range(5)), name="source")
    with graph.loader() as loader:
        list(loader)
        assert not any(loader._tracer.take())


def test_recording_makes_no_work_for_the_garbage_collector():
    tracer, chunk = Tracer(), Chunk(None, (("read", 3),))
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(1_000):
            tracer.worked("decode", 5)
            tracer.sent("decode", chunk)
            tracer.delivered(7, chunk)
        assert len(gc.get_objects()) < before + 100
    finally:
        gc.enable()
    events = tracer.take()
    assert [len(each) for each in events] == [1_000] * 3
    assert events.worked[-1].took_ns == 5 and events.sent[-1].lineages == (("read", 3),)
    assert not any(tracer.take())


def test_of_too_many_events_the_oldest_are_dropped(monkeypatch):
    monkeypatch.setattr("pipegraph.engine.tracing.MAX_EVENTS", 3)
    tracer = Tracer()
    for took in range(5):
        tracer.worked("decode", took)
    assert [event.took_ns for event in tracer.take().worked] == [2, 3, 4]


def test_tracks_keep_their_names_where_the_loader_is_closed_before_the_recording_ends(tmp_path):
    graph = pg.Graph("closed first")
    graph.add(ops.FromSequence(range(40)), name="read").then(lambda x: x, name="decode", workers=2)
    path = tmp_path / "trace.json"
    loader = graph.loader()
    with pg.record(loader, trace=path), loader:
        assert len(list(loader)) == 40
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "read 0" in names and not any(name.startswith("thread ") for name in names)
