"""A group that fails in a worker process is blamed on its own samples, as in a thread."""

from functools import partial

import pytest

import pipegraph as pg
from pipegraph import operators as ops

pytestmark = pytest.mark.usefixtures("no_leaks")

PLACES = [{"backend": "thread"}, {"backend": "process"}]


def refuses(threes, samples):
    if any(each in threes for each in samples):
        raise ValueError(f"bad {samples[0]}")
    return samples


class Pairs(pg.Regroup):
    """Makes pairs, and has released both samples of a pair that fails."""

    gives = "batch"

    def begin(self):
        self.held = []

    def process(self, chunk):
        self.held.append(chunk)
        if len(self.held) < 2:
            return ()
        pair, self.held = self.held, []
        if pair[1].data % 4 == 3:
            self.failing = pair
            raise ValueError(f"bad {pair[1].data}")
        return (pg.Chunk.group(pair, [each.data for each in pair]),)


class Costly(pg.Regroup):
    """Refuses single samples, and says of none that it has released it."""

    gives = "batch"

    def process(self, chunk):
        if chunk.data % 4 == 3:
            raise ValueError(f"bad {chunk.data}")
        return (pg.Chunk.group([chunk], [chunk.data]),)


def stages():
    return {
        "a batch": ops.Batch(4, collate=partial(refuses, {3, 15, 23, 35})),
        "a batch by cost": ops.Batch(cost=lambda sample: 1, limit=4, collate=partial(refuses, {3, 15})),
        "the last batch": ops.Batch(7, collate=partial(refuses, {39})),
        "a user's pairs": Pairs(),
        "single samples": Costly(),
    }


def seen(operator, on_error, items=range(40), **where):
    graph = pg.Graph("g", seed=1)
    graph.add(ops.FromSequence(items), name="src").then(operator, name="work", on_error=on_error, **where)
    with graph.loader() as loader:
        found, notes = [], None
        try:
            found.extend(map(list, loader))
        except ValueError as error:
            notes = str(error), error.__notes__
        profile = loader.profile()
        listed = [(each.key, each.position, each.error) for each in profile.quarantined]
        # After an error the stage may read ahead.
        failed = None if notes else profile.stages["work"].failed
        return found, notes, profile.quarantined_count, listed, failed


@pytest.mark.parametrize("on_error", [pg.Skip(20), "raise"], ids=["skips", "raises"])
@pytest.mark.parametrize("stage", list(stages()))
def test_a_group_that_fails_is_blamed_on_its_own_samples_wherever_it_was_made(stage, on_error):
    in_thread, *elsewhere = [seen(stages()[stage], on_error, **where) for where in PLACES]
    assert in_thread[1] or in_thread[2] == 40 - sum(map(len, in_thread[0])) > 0
    assert elsewhere == [in_thread]
