"""What measurements are asked with: refused by name where it is no number, flag or function."""

import contextlib
import math
import os
import pathlib
import xml.etree.ElementTree

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError


@pytest.fixture(scope="module")
def loader():
    graph = pg.Graph("asked")
    graph.add(ops.FromSequence(range(20)), name="read").then(abs, name="f")
    with graph.loader() as made:
        assert len(list(made)) == 20
        yield made


@pytest.mark.parametrize(
    ("step", "asked", "says"),
    [
        (None, {}, "step"),
        (5, {}, "step"),
        (abs, {"batches": "2"}, "batches"),
        (abs, {"batches": 1.5}, "batches"),
        (abs, {"steps": True}, "steps"),
        (abs, {"steps": 0}, "steps"),
    ],
)
def test_headspace_refuses_what_it_cannot_call_or_count(loader, step, asked, says):
    with pytest.raises(GraphError, match=f"^headspace: {says}"):
        loader.headspace(step, **asked)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"every": math.inf}, "every"),
        ({"every": "1"}, "every"),
        ({"every": math.nan}, "every"),
        ({"log": 5}, "log"),
    ],
)
def test_a_recording_refuses_what_its_thread_could_not_use(loader, asked, says):
    with pytest.raises(GraphError, match=f"^record: {says}"):
        pg.record(loader, **asked)


FULL = pathlib.Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@needs_full
@pytest.mark.parametrize("what", ["report", "trace"])
def test_a_file_on_a_full_disk_is_named(loader, what):
    with pytest.raises(OSError, match="/dev/full"), pg.record(loader, **{what: FULL}):
        pass


@needs_full
@pytest.mark.parametrize("terminal", [False, True])
def test_a_live_view_that_cannot_be_written_does_not_end_training(terminal):
    console = pytest.importorskip("rich.console")
    graph = pg.Graph("shown")
    graph.add(ops.FromSequence(range(20)), name="read")
    with open(os.open(FULL, os.O_WRONLY), "w", buffering=1) as full, graph.loader() as loader:
        view = pg.live(loader, console.Console(file=full, force_terminal=terminal))
        assert list(view) == list(range(20))
        with contextlib.suppress(OSError):
            full.close()


def test_a_picture_is_well_formed_whatever_the_names():
    graph = pg.Graph("a\x00b\x1b")
    try:
        graph.add(ops.FromSequence(range(3)), name="read\x0b\x01<&")
    except GraphError:
        return
    title = xml.etree.ElementTree.fromstring(graph.to_svg())[0].text
    assert title.startswith("the pipeline 'a")
