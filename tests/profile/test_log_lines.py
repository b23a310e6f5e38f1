"""``log_every=``: lines in the log while passes run."""

import logging

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError

pytestmark = pytest.mark.usefixtures("no_leaks")


def rows(**options):
    graph = pg.Graph("rows", seed=1)
    graph.add(ops.FromSequence(range(100)), name="read").then(lambda x: x, name="same").then(ops.Batch(10))
    return graph.loader(epochs=None, **options)


def test_a_line_with_rate_and_waits_is_logged_as_batches_are_asked_for(caplog):
    caplog.set_level(logging.INFO, "pipegraph")
    with rows(log_every=1e-9) as loader:
        assert len(list(loader)) == len(list(loader)) == 10
    lines = [record.message for record in caplog.records if record.message.startswith("graph 'rows'")]
    assert len(lines) == 22  # the end is asked for too
    assert lines[3].startswith("graph 'rows', epoch 0, 3 delivered: ")
    assert lines[14].startswith("graph 'rows', epoch 1, 3 delivered: ")
    assert all(" samples/s, waited " in each for each in lines)


def test_both_the_tuner_and_the_log_watch_a_pass(caplog):
    caplog.set_level(logging.INFO, "pipegraph")
    with rows(log_every=0, autotune=True) as loader:
        list(loader)
        assert loader.tuning() is not None
    assert caplog.records


def test_nothing_is_logged_unless_it_was_asked_for_and_due(caplog):
    caplog.set_level(logging.INFO, "pipegraph")
    for options in ({}, {"log_every": 3600}):
        with rows(**options) as loader:
            list(loader)
    assert not caplog.records
    for wrong in (-1, "30", float("nan")):
        with pytest.raises(GraphError, match=r"log_every \(seconds\) must be a number >= 0, got"):
            rows(log_every=wrong)
