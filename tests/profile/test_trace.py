"""Traces: valid nesting on every track, and steps that name their samples."""

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


def test_steps_name_the_samples_that_they_train_on(trace):
    steps = sorted((event["ts"], event["args"]["first"]) for event in trace if event["name"] == "step")
    assert len(steps) == 10
    assert steps[0][1] == ["read 0", "read 1", "read 2", "read 3"]
