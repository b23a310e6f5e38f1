"""Compressed parts of formats with random access, unpacked into memory."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any, final

from pipegraph.errors import ShardError
from pipegraph.storage.shard_files import BytesFile, ShardFile

from .offset_table import TableRows
from .shard_format import BLOCK_NBYTES, Block, Format, Sample
from .unpacking import unpacked


@final
class PackedFormat(Format):
    """Another format's parts, packed with gz or zst: a stream has no middle, so a part is one block.

    Args:
        inner: reads what is unpacked; its blocks are :class:`TableRows`.
        suffixes: of the packed parts.
    """

    needs_file = False

    def __init__(self, inner: Format, suffixes: tuple[str, ...]) -> None:
        self.inner, self.suffixes = inner, suffixes

    def choosing(self, columns: Sequence[str] | None, filter: Any) -> PackedFormat:
        return PackedFormat(self.inner.choosing(columns, filter), self.suffixes)

    def samples(self, file: ShardFile) -> Iterator[Sample]:
        return self.inner.samples(self._unpacked(file))

    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        whole = self._unpacked(file)
        count = sum(block.samples for block in self.inner.index(whole, whole.size))
        if count:
            yield Block(0, file.size, 0, count)

    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        whole = self._unpacked(file)
        found = next(iter(self.inner.index(whole, whole.size)), None)
        if found is None or found.samples != block.samples:
            raise ShardError(
                f"{file.name}: it holds {found.samples if found else 0} samples, its index says {block.samples}; make "
                "the index anew"
            )
        return self.inner.read(whole, found)

    def held_nbytes(self, samples: Sequence[Sample], block: Block) -> int:
        assert isinstance(samples, TableRows)
        return samples.file.size + samples.nbytes

    def _unpacked(self, file: ShardFile) -> BytesFile:
        data = io.BytesIO()
        for piece in unpacked(file):
            data.write(piece)
            self.take_room(data.tell(), file.name)
        return BytesFile(data.getvalue(), file.name)
