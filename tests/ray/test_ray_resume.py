"""States of graphs with stages in actors: exact at every step, and the same as without."""

import json

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import assert_resumes_exactly
from pipegraph.testing.outcome import placed, run_pass

pytestmark = pytest.mark.usefixtures("cluster")


def make():
    def draw(x, rng):
        return {"x": x, "draw": float(rng.random())}

    graph = pg.Graph("g", seed=3)
    numbers = graph.add(ops.FromSequence(range(12), shuffle=True))
    drawn = numbers.then(ops.Map(draw), name="draw", workers=2, backend="ray")
    drawn.then(ops.Batch(5))
    return graph


@pytest.mark.slow
def test_resumes_exactly_at_every_step():
    assert_resumes_exactly(make, epochs=1)


def test_a_state_taken_with_actors_is_good_without_and_the_other_way_round():
    inline = placed(make(), "inline", 1)
    with inline.loader() as loader:
        whole = run_pass(loader).chunks
    for first, second in ((make(), inline), (inline, make())):
        with first.loader() as loader:
            next(iter(loader))
            state = json.dumps(loader.state_dict())
        with second.loader() as loader:
            loader.load_state_dict(json.loads(state))
            assert run_pass(loader).chunks == whole[1:]
