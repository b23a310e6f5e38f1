"""Sub-blocks: what `pipegraph index` writes of them is what lies in the part."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipegraph.storage import LocalFile, Manifest, build_manifest
from pipegraph.storage import sub_blocks as module
from pipegraph.storage.checksum import file_crc32c
from pipegraph.storage.formats import Block, Format, format_of, register_format
from pipegraph.storage.formats.shard_format import Sample
from pipegraph.storage.shard_files import ShardFile
from pipegraph.storage.sub_blocks import SUFFIX, SubBlockFolder


def indexed(folder: Path, out: Path, **more: Any) -> tuple[Manifest, SubBlockFolder]:
    manifest = build_manifest(sorted(folder.glob("part-*")), out, sub_blocks=True, **more)
    return manifest, SubBlockFolder(f"{out}{SUFFIX}", manifest, None)


@pytest.mark.parametrize("form", ["tar", "jsonl", "npy", "bin", "parquet"])
def test_sub_blocks_hold_their_blocks_samples_and_carry_their_checksums(
    form: str, write_shards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SUB_BLOCK_NBYTES", 1_500)
    folder = write_shards(form, 2, 100)
    manifest, found = indexed(folder, tmp_path / "manifest.json", block_nbytes=9_000)
    cut = 0
    for number in range(manifest.blocks):
        part_number, block = manifest.block(number)
        part = manifest.parts[part_number]
        sub_blocks = found.of(number)
        if sub_blocks is None:
            continue
        cut += 1
        with LocalFile(part.uri) as file:
            whole = format_of(part).read(file, block)
            samples: list[Sample] = []
            for sub_block in sub_blocks.sub_blocks:
                assert sub_block.crc32c == file_crc32c(file, sub_block.block.offset, sub_block.block.nbytes)
                assert sub_block.block.first == block.first + len(samples)
                samples += format_of(part).read(file, sub_block.block)[:]
            assert repr(samples) == repr(whole[:])
            for index in range(block.samples):
                which, sub_block = sub_blocks.of(index)
                assert sub_blocks.sub_blocks[which] is sub_block
                assert (
                    sub_block.block.first
                    <= block.first + index
                    < sub_block.block.first + sub_block.block.samples
                )
    assert cut > manifest.blocks // 2


def test_a_packed_part_has_no_sub_blocks(write_shards: Any, tmp_path: Path) -> None:
    manifest, found = indexed(write_shards("jsonl.gz", 1, 50), tmp_path / "manifest.json")
    assert found.of(0) is None
    assert manifest.blocks == 1


def test_sub_blocks_that_are_not_there_cut_short_or_damaged_are_as_none(
    write_shards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SUB_BLOCK_NBYTES", 1_000)
    out = tmp_path / "manifest.json"
    manifest, found = indexed(write_shards("tar", 1, 100), out)
    (path,) = Path(f"{out}{SUFFIX}").iterdir()
    data = path.read_bytes()
    assert found.of(0) is not None
    for broken in (
        data[:10],
        data[: len(data) // 2],
        data[:-1],
        bytes(len(data)),
        data[:60] + b"\x07" + data[61:],
    ):
        path.write_bytes(broken)
        assert SubBlockFolder(f"{out}{SUFFIX}", manifest, None).of(0) is None
    path.unlink()
    assert SubBlockFolder(f"{out}{SUFFIX}", manifest, None).of(0) is None


def test_a_stopped_index_writes_the_sub_blocks_of_the_rest_only(
    write_shards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = write_shards("npy", 3, 2_000), tmp_path / "manifest.json"
    read: list[str] = []
    index_part = module.SubBlockWriter.__init__

    def noted(self: Any, form: Any, file: Any) -> None:
        read.append(file.name)
        index_part(self, form, file)
        if len(read) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.SubBlockWriter, "__init__", noted)
    with pytest.raises(KeyboardInterrupt):
        indexed(folder, out, workers=1)
    manifest, found = indexed(folder, out, workers=1)
    assert len(read) == 4
    assert all(found.of(number) is not None for number in range(manifest.blocks))


class Pairs(Format):
    """Ten bytes are a sample; blocks of three, but never fewer than two samples: these do not line up."""

    suffixes = (".pairs",)

    def samples(self, file: ShardFile) -> Iterator[Sample]:
        for block in self.index(file):
            yield from self.read(file, block)

    def index(self, file: ShardFile, block_nbytes: int = 30) -> Iterator[Block]:
        step = max(2, block_nbytes // 10)
        for first in range(0, file.size // 10, step):
            rows = min(step, file.size // 10 - first)
            yield Block(10 * first, 10 * rows, first, rows)

    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        return [{"x": file.read_at(block.offset + 10 * i, 10)} for i in range(block.samples)]


def test_a_format_whose_single_samples_do_not_line_up_with_its_blocks_has_no_sub_blocks(
    tmp_path: Path,
) -> None:
    register_format(Pairs())
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "part-0.pairs").write_bytes(bytes(range(90)))
    manifest, found = indexed(folder, tmp_path / "manifest.json", block_nbytes=30)
    assert manifest.blocks == 3
    assert [found.of(number) for number in range(3)] == [None, None, None]
