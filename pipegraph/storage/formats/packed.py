"""Compressed parts of formats with random access, unpacked into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from pipegraph.storage.shard_files import ShardFile

from .block_samples import BlockSamples
from .shard_format import BLOCK_NBYTES, Block, Format, Sample
from .unpacking import in_memory


@final
class PackedFormat(Format):
    """Another format's parts, packed with gz or zst: a stream has no middle, so a part is one block."""

    needs_file = False

    def __init__(self, inner: Format, suffixes: tuple[str, ...]) -> None:
        self.inner, self.suffixes, self.holds_samples = inner, suffixes, inner.holds_samples

    def choosing(self, columns: Sequence[str] | None, filter: Any, fill: Any = None) -> PackedFormat:
        return PackedFormat(self.inner.choosing(columns, filter, fill), self.suffixes)

    def samples(self, file: ShardFile) -> Iterator[Sample]:
        return self.inner.samples(in_memory(file, self.take_room))

    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        whole = in_memory(file, self.take_room)
        count = sum(block.samples for block in self.inner.index(whole, whole.size))
        if count:
            yield Block(0, file.size, 0, count)

    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        whole = in_memory(file, self.take_room)
        found = next(iter(self.inner.index(whole, whole.size)), None)
        block.check(f"{file.name}: it", found.samples if found else 0)
        assert found is not None
        rows = self.inner.read(whole, found)
        assert isinstance(rows, BlockSamples)
        rows.nbytes += whole.size
        return rows
