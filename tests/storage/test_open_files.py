"""Local parts read in place: few open at once, checked once, never two states of one file."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipegraph.errors import DataError
from pipegraph.storage import Part
from pipegraph.storage.block_bytes import BlockBytes

DATA = bytes(range(256)) * 40


@pytest.fixture
def part(tmp_path: Path) -> Part:
    (tmp_path / "a.bin").write_bytes(DATA)
    return Part(str(tmp_path / "a.bin"), len(DATA))


def test_of_more_parts_than_may_be_open_each_is_read(
    tmp_path: Path, open_descriptors: Callable[[], list[str]]
) -> None:
    local, files = BlockBytes(max_open=4), []
    before = len(open_descriptors())
    for number in range(20):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(bytes([number]) * 100)
        files.append(local.part(Part(str(path), 100)))
    for _ in range(3):
        assert [file.read_at(50, 1)[0] for file in files] == list(range(20))
        assert len(open_descriptors()) <= before + 4
    for file in files:
        file.close()
    assert len(open_descriptors()) == before


def test_a_file_that_is_another_one_when_it_is_opened_again_is_an_error(tmp_path: Path, part: Part) -> None:
    local = BlockBytes(max_open=1)
    file = local.part(part)
    other = tmp_path / "b.bin"
    other.write_bytes(DATA[::-1])
    local.part(Part(str(other), len(DATA)))
    os.replace(other, part.uri)
    with pytest.raises(DataError, match="was written again since"):
        file.read_at(0, 10)
