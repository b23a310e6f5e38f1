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
