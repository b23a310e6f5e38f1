"""Data whose length is not known until it is asked for, and samplers that fail half-way."""

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops

pytestmark = pytest.mark.usefixtures("no_leaks")


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(6))


def loader_of_a_stream():
    """It has a ``__len__``, which raises TypeError."""
    return torch.utils.data.DataLoader(Stream(), batch_size=None)


class Refuses(list):
    """Libraries have errors of their own for a length that they do not know."""

    error = NotImplementedError

    def __len__(self):
        raise self.error


def refuses_with(error):
    return type("Refuses", (Refuses,), {"error": error})(range(6))


@pytest.mark.parametrize(
    "make",
    [
        loader_of_a_stream,
        *(
            lambda error=error: refuses_with(error)
            for error in (NotImplementedError, AttributeError, RuntimeError, ValueError)
        ),
    ],
    ids=["DataLoader", "NotImplementedError", "AttributeError", "RuntimeError", "ValueError"],
)
def test_a_source_whose_len_refuses_has_no_length_and_a_state(make):
    graph = pg.Graph("g")
    graph.add(ops.FromIterable(make()))
    with graph.loader() as loader:
        with pytest.raises(TypeError, match="no length"):
            len(loader)
        passing = iter(loader)
        head = [int(next(passing)) for _ in range(2)]
        state = loader.state_dict()
    again = pg.Graph("g")
    again.add(ops.FromIterable(make()))
    with again.loader() as loader:
        loader.load_state_dict(state)
        assert head + [int(x) for x in loader] == list(range(6))
    with again.loader(rank=1, world_size=2, equal_steps=False) as loader:
        assert [int(x) for x in loader] == [1, 3, 5]


class Fails:
    """A sampler that fails after so many draws."""

    def __init__(self, draws):
        self.draws = draws

    def __iter__(self):
        yield from range(self.draws)
        raise OSError("the index is gone")


class Grouped(list):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("draws", [0, 5, 16, 37])
@pytest.mark.parametrize("data", [Grouped, list], ids=["in groups", "one by one"])
@pytest.mark.parametrize("batched", [False, True])
def test_what_a_sampler_drew_before_it_failed_is_delivered(data, draws, batched):
    graph = pg.Graph("g")
    node = graph.add(ops.FromSequence(data(range(100)), sampler=Fails(draws)), workers=2)
    if batched:
        node.then(ops.Batch(1, collate=list)).then(ops.Unbatch())
    got = []
    with graph.loader() as loader, pytest.raises(OSError, match="the index is gone") as failed:
        for x in loader:
            got.append(x)
    assert got == list(range(draws))
    assert any(f"item {draws} of this rank" in note for note in failed.value.__notes__)


class Says(pg.Operator):
    """Makes two of each item, and says that it makes ``times``."""

    kind = "expand"
    depends_on = "item"

    def __init__(self, times):
        self.times = times

    def process(self, chunk):
        return [chunk.child(index, (chunk.data, index)) for index in range(2)]

    def length(self, n):
        return None if self.times is None else self.times * n


def said(times, batch=1):
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(6))).then(Says(times), name="twice").then(ops.Batch(batch, collate=list))
    return graph


@pytest.mark.parametrize("times", [2, None])
def test_an_operator_that_says_its_length_or_none_ends_its_epochs_also_after_a_resume(times):
    with said(times, 4).loader(epochs=2) as loader:
        whole = [list(loader) for _ in range(2)]
    loader = said(times, 4).loader(epochs=2)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    with said(times, 4).loader(epochs=2) as loader:
        loader.load_state_dict(state)
        assert [list(loader) for _ in range(2)] == [whole[0][1:], whole[1]]
