"""Profiles taken before the first pass, after a pass was cut off, after an error, after ``close()``: finite numbers."""

import json
import math

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import pipegraph as pg
from pipegraph import operators as ops
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
