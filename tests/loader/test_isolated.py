"""loader(isolate=True): as without, with the host's part in a process of its own."""

import os
import signal

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import assert_resumes_exactly

pytestmark = pytest.mark.usefixtures("no_leaks")


def row(x):
    return {"key": f"k{x}", "x": np.full(3, x, np.float32)}


def graph(rows=40):
    graph = pg.Graph("isolated", seed=1)
    read = graph.add(ops.FromSequence(range(rows), shuffle=True), name="rows").then(row, workers=2)
    read.then(ops.Shuffle(6)).then(ops.Batch(4), name="batch").then(ops.Pin()).then(ops.CopyToDevice("cpu"))
    return graph


def seen(loader):
    return [
        (chunk.epoch, chunk.keys, chunk.positions.tolist(), chunk.data["x"].tolist())
        for chunk in loader.chunks()
    ]


def test_it_delivers_what_the_loader_does_from_another_process():
    with graph().loader(epochs=2) as here, graph().loader(epochs=2, isolate=True) as apart:
        assert len(here) == len(apart) == 10
        for _ in range(2):
            assert seen(here) == seen(apart)
        assert set(apart.profile().stages) >= {"rows", "batch"}
        assert apart.profile(apart.profile()).items == 0


def test_its_functions_run_in_a_process_of_their_own():
    own = pg.Graph("pids")
    own.add(ops.FromSequence(range(3))).then(lambda x: os.getpid())
    with own.loader(isolate=True) as loader:
        assert os.getpid() not in list(loader)


def test_it_resumes_exactly_behind_every_chunk():
    assert_resumes_exactly(lambda: graph(16), isolate=True)


def test_a_child_that_is_killed_again_and_again_is_named():
    def dies(x):
        if x == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    own = pg.Graph("dies")
    own.add(ops.FromSequence(range(20))).then(dies).then(ops.Batch(2))
    with own.loader(isolate=True) as loader, pytest.raises(pg.errors.WorkerDiedError, match="'isolated'"):
        list(loader)


def test_an_error_in_the_child_names_its_stage_and_sample():
    def breaks(x):
        raise ValueError("no")

    own = pg.Graph("breaks")
    own.add(ops.FromSequence(range(20))).then(breaks, name="breaks")
    with own.loader(isolate=True) as loader, pytest.raises(ValueError, match="no") as caught:
        list(loader)
    assert any("stage 'breaks', sample 0 at position 0" in text for text in caught.value.__notes__)
