"""Tensors of one element count as contiguous, whatever their strides say, and cross and are kept like all others."""

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops

TABLE = torch.arange(14.0).view(7, 2)
COLUMNS = {
    "one row of a column": TABLE[3:4, 1],
    "no row": TABLE[:0, 1],
    "conjugate": torch.tensor([1 + 2j, 3.0]).conj(),
    "one row of a conjugate": torch.tensor([[1 + 2j, 3.0]]).conj()[:, 1],
    "negative": torch.tensor([1 + 2j]).conj().imag,
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("place", ["process", "cache", "copy"])
def test_a_column_arrives_as_it_is(place, column):
    graph = pg.Graph("columns")
    node = graph.add(ops.FromSequence([{"x": column}]))
    if place == "process":
        node = node.then(dict, backend="process")
    elif place == "cache":
        node = node.then(ops.Cache("1 MB"))
    elif place == "copy":
        node = node.then(ops.CopyToDevice("cpu"))
    with graph.loader(epochs=2) as loader:
        for _ in range(2):
            (sample,) = loader
            assert sample["x"].dtype == column.dtype
            assert torch.equal(sample["x"], column)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(TABLE)

    def __getitem__(self, index):
        return TABLE[index]


def second_column(rows):
    return torch.stack(rows)[:, 1]


def test_a_collate_function_may_return_a_column():
    loader = pg.DataLoader(Rows(), 3, num_workers=1, collate_fn=second_column)
    assert [batch.tolist() for batch in loader] == [[1.0, 3.0, 5.0], [7.0, 9.0, 11.0], [13.0]]
