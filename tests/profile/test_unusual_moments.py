"""Profiles taken before the first pass, after a pass was cut off, after an error, after ``close()``: finite numbers."""

import json
import math
import pickle

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError
from pipegraph.profile.report import render_report


class CannotOpen(ops.FromSequence):
    def open(self, context):
        raise RuntimeError("no device")


def loader_of(source, function=lambda x: x):
    graph = pg.Graph("unusual")
    graph.add(source, name="read").then(function, name="work", workers=2).then(ops.Batch(5), name="batch")
    return graph.loader()


def never(constant):
    raise ValueError(f"not JSON: {constant}")


def check(loader):
    profile = loader.profile()
    for each in (profile, loader.profile(since=profile)):
        assert str(each) and repr(each) and json.loads(each.to_json(), parse_constant=never)
        assert all(math.isfinite(number) for number in each.scalars().values())
        assert str(each.advice)
        assert "Profile of unusual" in render_report(each)
    assert list(text_string_to_metric_families(loader.metrics()))
    return profile


def test_before_any_pass_and_closed_without_one():
    loader = loader_of(ops.FromSequence(range(50)))
    check(loader)
    loader.close()
    assert "Nothing has been delivered yet." in str(check(loader))


def test_a_pass_that_was_cut_off_before_and_after_its_first_batch():
    with loader_of(ops.FromSequence(range(500))) as loader:
        iter(loader)
        check(loader)
        for _ in loader:
            break
        assert check(loader).items == 1
        passed = iter(loader)
        next(passed)
        check(loader)
    assert check(loader).items == 2


@pytest.mark.parametrize("source", [ops.FromSequence(range(0)), ops.FromIterable(())])
def test_an_empty_pass(source):
    with loader_of(source) as loader:
        assert list(loader) == []
        assert check(loader).items == 0


def test_a_pass_that_failed_at_an_item_and_one_that_could_not_start():
    def fails(x):
        if x == 7:
            raise ValueError("seven")
        return x

    loader = loader_of(ops.FromSequence(range(50)), fails)
    with pytest.raises(ValueError, match="seven"):
        list(loader)
    assert check(loader).stages["work"].failed == 1
    loader.close()
    check(loader)
    with loader_of(CannotOpen(range(3))) as loader:
        with pytest.raises(RuntimeError, match="no device"):
            list(loader)
        check(loader)


def test_an_earlier_profile_is_one_of_the_same_loader():
    graph = pg.Graph("two loaders")
    graph.add(ops.FromSequence(range(20)), name="numbers")
    with graph.loader() as loader, graph.loader() as other:
        for since in (3, "profile"):
            with pytest.raises(GraphError, match="since must be an earlier profile of this loader"):
                loader.profile(since=since)
        first = loader.profile()
        assert len(list(loader)) == len(list(other)) == 20
        assert loader.profile(since=first).items == 20
        with pytest.raises(GraphError, match="since must be an earlier profile of this loader"):
            other.profile(since=loader.profile())
        with pytest.raises(GraphError, match="since must be an earlier profile of this loader"):
            loader.profile(since=pickle.loads(pickle.dumps(loader.profile())))


def test_one_recording_at_a_time_traces_and_only_loaders_are_recorded(tmp_path):
    graph = pg.Graph("traced twice")
    graph.add(ops.FromSequence(range(20)), name="numbers")
    with graph.loader() as loader, pg.record(loader, trace=tmp_path / "a.json"):
        with (
            pytest.raises(GraphError, match="traced by another recording"),
            pg.record(loader, trace=tmp_path / "b.json"),
        ):
            pass
        with pg.record(loader, log=lambda numbers, step: None):
            assert len(list(loader)) == 20
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    for make in (pg.record, pg.live):
        with pytest.raises(GraphError, match=r"expected a loader, as graph.loader\(\) makes it"):
            make(graph)
