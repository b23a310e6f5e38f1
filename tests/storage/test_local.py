"""Local parts read in place: few open at once, checked once, never two states of one file."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipegraph.errors import ChecksumError, ShardError
from pipegraph.storage import Part, local as module
from pipegraph.storage.formats.shard_format import Block
from pipegraph.storage.local import LOOK_EVERY, LocalParts
from pipegraph.storage.open_blocks import open_block
from pipegraph.storage.shard_files import crc32c_extend

DATA = bytes(range(256)) * 40
BLOCK = Block(100, 5_000, 0, 1)


@pytest.fixture
def part(tmp_path: Path) -> Part:
    (tmp_path / "a.bin").write_bytes(DATA)
    return Part(str(tmp_path / "a.bin"), len(DATA))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each checksum that is computed."""
    found: list[int] = []
    compute = module.file_crc32c

    def counted(file: Any, offset: int, nbytes: int) -> int:
        found.append(nbytes)
        return compute(file, offset, nbytes)

    monkeypatch.setattr(module, "file_crc32c", counted)
    return found


def open_and_close(part: Part, local: LocalParts) -> None:
    crc = crc32c_extend()(0, DATA[BLOCK.offset : BLOCK.offset + BLOCK.nbytes])
    open_block(part, BLOCK, crc32c=crc, local=local).close()


def test_a_block_that_was_found_right_is_not_read_again_when_it_is_opened_again(
    part: Part, computed: list[int]
) -> None:
    local = LocalParts()
    for _ in range(3):
        open_and_close(part, local)
    assert computed == [BLOCK.nbytes]


def test_a_block_of_a_file_that_was_written_since_is_checked_again(part: Part, computed: list[int]) -> None:
    local = LocalParts()
    open_and_close(part, local)
    Path(part.uri).write_bytes(DATA[:200] + b"x" + DATA[201:])
    os.utime(part.uri, ns=(1, 1))
    with pytest.raises(ChecksumError):
        open_and_close(part, local)
    assert computed == [BLOCK.nbytes] * 2


def test_of_more_parts_than_may_be_open_each_is_read(
    tmp_path: Path, open_descriptors: Callable[[], list[str]]
) -> None:
    local, files = LocalParts(max_open=4), []
    before = len(open_descriptors())
    for number in range(20):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(bytes([number]) * 100)
        files.append(local.open(Part(str(path), 100)))
    for _ in range(3):
        assert [file.read_at(50, 1)[0] for file in files] == list(range(20))
        assert len(open_descriptors()) <= before + 4
    for file in files:
        file.close()
    assert len(open_descriptors()) == before


def test_a_file_that_is_another_one_when_it_is_opened_again_is_an_error(tmp_path: Path, part: Part) -> None:
    local = LocalParts(max_open=1)
    file = local.open(part)
    other = tmp_path / "b.bin"
    other.write_bytes(DATA[::-1])
    local.open(Part(str(other), len(DATA)))
    os.replace(other, part.uri)
    with pytest.raises(ShardError, match="was changed while it was read"):
        file.read_at(0, 10)


def test_a_file_that_is_written_over_while_it_is_open_is_an_error(part: Part) -> None:
    file = LocalParts().open(part)
    before = os.stat(part.uri).st_mtime_ns
    assert file.read_at(0, 10) == DATA[:10]
    with open(part.uri, "r+b") as target:  # as long as before, in the same file
        target.write(DATA[::-1])
    os.utime(part.uri, ns=(before + 1, before + 1))
    with pytest.raises(ShardError, match="was changed while it was read"):
        for _ in range(LOOK_EVERY):
            file.read_at(10, 10)


def test_a_file_stays_open_while_it_is_looked_at_though_another_thread_makes_room(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = LocalParts(max_open=1)
    file = local.open(part)
    first, look = file.version(), os.fstat

    def makes_room(fd: int) -> os.stat_result:
        monkeypatch.setattr(os, "fstat", look)
        (tmp_path / "b.bin").write_bytes(DATA)
        local.open(Part(str(tmp_path / "b.bin"), len(DATA)))  # as another thread may at this moment
        return look(fd)

    monkeypatch.setattr(os, "fstat", makes_room)
    assert file.version() == first
