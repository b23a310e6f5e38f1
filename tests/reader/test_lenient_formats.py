"""A format of a user's own whose ``read`` takes what is broken for a shorter part."""

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import ShardError
from pipegraph.storage.formats import Block, Format, register_format

RECORD = 10


class Lenient(Format):
    suffixes = (".lenient",)

    def samples(self, file):
        for block in self.index(file):
            yield from self.read(file, block)

    def index(self, file, block_nbytes=100):
        for first in range(0, file.size // RECORD, 10):
            count = min(10, file.size // RECORD - first)
            yield Block(first * RECORD, count * RECORD, first, count)
        if file.size % RECORD:
            raise ShardError(f"{file.name}: no whole number of records")

    def read(self, file, block):
        data = file.read_at(block.offset, block.nbytes)
        return [{"data": data[at : at + RECORD]} for at in range(0, len(data), RECORD)]


class Short(Lenient):
    suffixes = (".short",)

    def read(self, file, block):
        return super().read(file, block)[:-1]


@pytest.fixture(autouse=True)
def registered():
    for form in (Lenient(), Short()):
        register_format(form)


def graph(path):
    made = pg.Graph("g")
    made.add(ops.ShardSelect(str(path))).then(ops.Load(), on_error=pg.Skip())
    return made


def test_what_is_broken_is_no_sample_although_the_format_would_read_it(tmp_path):
    (tmp_path / "a.lenient").write_bytes(b"x" * 204)
    with graph(tmp_path / "a.lenient").loader() as loader, pytest.raises(ShardError, match="no whole number"):
        list(loader)


def test_a_block_with_fewer_samples_than_the_manifest_says_fails(tmp_path):
    (tmp_path / "a.short").write_bytes(b"x" * 200)
    made = pg.Graph("g")
    made.add(ops.ShardSelect(str(tmp_path / "a.short"))).then(ops.Load(), name="load")
    with (
        made.loader() as loader,
        pytest.raises(ShardError, match="gives 9 samples, the manifest says 10") as failed,
    ):
        list(loader)
    assert "stage 'load'" in failed.value.__notes__[0]
