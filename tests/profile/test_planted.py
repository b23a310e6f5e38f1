"""200 generated pipelines with a planted bottleneck. Slow: some minutes."""

import pytest

from tests.profile.planted_pipelines import draw

PIPELINES = 200


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, PIPELINES, 10))
def test_the_planted_bottleneck_is_named_with_its_cause(first):
    wrong = []
    for seed in range(first, first + 10):
        pipeline = draw(seed)
        found = pipeline.run_as_planted()
        if (found.bottleneck, found.cause) != (pipeline.planted, pipeline.kind):
            wrong.append((seed, pipeline, found.bottleneck, found.cause, str(found)))
    assert not wrong
