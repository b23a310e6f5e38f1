"""What a newcomer meets first."""

from __future__ import annotations

import pytest

import pipegraph as pg
from pipegraph import operators as ops


def test_a_first_pipeline_prints_its_plan_runs_and_says_what_set_the_pace() -> None:
    graph = pg.Graph("first")
    graph.add(ops.FromSequence(range(10))).then(lambda x: x * x, name="square", workers=2).then(ops.Batch(4))
    assert "square" in str(graph.plan())
    with graph.loader() as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]
    assert "square" in str(loader.profile())


def test_an_argument_of_another_library_is_no_argument_here() -> None:
    graph = pg.Graph("habits")
    with pytest.raises(TypeError, match="num_workers"):
        graph.add(ops.FromIterable(range(3))).then(abs, num_workers=4)  # type: ignore[call-arg]
