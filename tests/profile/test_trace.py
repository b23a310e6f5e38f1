"""Traces: valid nesting on every track, and samples that can be followed from their source to their step."""

import json
import threading
from collections import defaultdict

import pytest

import pipegraph as pg
from pipegraph import operators as ops


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
