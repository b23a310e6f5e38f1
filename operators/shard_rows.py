"""The samples of shards, read where a source's workers are: in actors, so that a shard's bytes never cross the trainer.

Which sample comes next is decided in the trainer, by the ``ShardSelect`` and its manifest. A worker gets part, block
and number of each sample, and reads it in place: it needs no manifest, and shares no blocks with others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, final

import numpy as np

from pipegraph.capabilities import BundleSource
from pipegraph.contracts import Context, History
from pipegraph.errors import DataError, ShardError
from pipegraph.operators.ordered import OrderedSource
from pipegraph.operators.shards import ShardSelect
from pipegraph.stopping import Stopping
from pipegraph.storage import Part, ShardFile
from pipegraph.storage.formats import Block, Format, format_of
from pipegraph.storage.local import LocalParts
from pipegraph.storage.open_blocks import open_block
from pipegraph.storage.parts import is_url

BLOCKS = 1024
"""Blocks of which a worker knows where each sample lies: more than an order has open at once (240 by default)."""

Place = tuple[Part, Block, int | None, int]
"""A part, a block of it with its CRC-32C, and the number of a sample in that."""


@final
class _Here:
    """A value that stays in its process: pickled, it is None."""

    def __init__(self, value: Any) -> None:
        self.value: Final = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _Here, (None,)


def readable_in_place(select: ShardSelect) -> bool:
    """Whether the parts are known, by their names alone, to be files from which single samples can be read."""
    parts = select.parts
    names = [parts] if isinstance(parts, str | os.PathLike) else list(parts)
    return not select.whole_parts and all(map(_is_in_place, names))


def _is_in_place(name: Any) -> bool:
    uri = name.uri if isinstance(name, Part) else os.fspath(name)
    if not isinstance(uri, str) or is_url(uri):
        return False
    try:
        form = format_of(uri)
    except DataError:  # a folder
        return False
    # Where a format knows its fields, parts are compared, which reads all of them.
    return form.in_place and type(form).fields is Format.fields


@final
class ShardRows(OrderedSource, BundleSource):
    """The samples of a ``ShardSelect``, in the same order; see the module docstring."""

    name = "shardselect"

    def __init__(self, select: ShardSelect) -> None:
        super().__init__(select.order)
        self._select = _Here(select)
        self._stopping: Stopping | None = None
        self._local = _Here(None)
        self._blocks: dict[tuple[str, int], tuple[ShardFile, Sequence[Any]]] = {}

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = self._select.value.config()
        return found

    def layout(self) -> Any:
        return self._select.value.manifest()

    def open(self, context: Context) -> None:
        super().open(context)
        self._stopping = context.stopping
        self._local, self._blocks = _Here(LocalParts()), {}  # of this worker

    def close(self) -> None:
        blocks, self._blocks = self._blocks, {}
        for file, _ in blocks.values():
            file.close()

    def begin_run(self, epoch: int, history: History) -> None:
        if self._stopping is not None:
            self._select.value.find(self._stopping)
        super().begin_run(epoch, history)

    def indices_of(self, positions: Sequence[int], epoch: int) -> Sequence[Place]:
        """Where the samples lie; the trainer knows."""
        return self._places(super().indices_of(positions, epoch))

    def _places(self, indices: Sequence[int]) -> list[Place]:
        manifest = self.layout()
        found: list[Place] = []
        blocks: dict[int, tuple[Part, Block, int | None]] = {}
        for number, place in self._select.value.places(np.asarray(indices)):
            if number not in blocks:
                at, block = manifest.block(number)
                part = manifest.parts[at]
                part = replace(part, uri=os.path.abspath(part.uri))  # a worker's folder is another one
                blocks[number] = part, block, manifest.block_checksum(number)
            found.append((*blocks[number], place))
        return found

    def item(self, index: int) -> Any:
        return self._sample(self._places([index])[0])

    def read_into(self, found: list[Any], indices: Sequence[Place], start: int) -> None:
        add = found.append  # which reports each that is done
        for place in islice(indices, start, None):
            add(self._sample(place))

    def _sample(self, place: Place) -> dict[str, Any]:
        part, block, crc32c, index = place
        key = part.uri, block.offset
        if key not in self._blocks:
            file = open_block(part, block, crc32c=crc32c, local=self._local.value)
            try:
                samples = format_of(part).read(file, block)
                if len(samples) != block.samples:
                    raise ShardError(
                        f"{part.name}, at byte {block.offset}: {len(samples)} samples, the manifest says "
                        f"{block.samples}: the part has changed or is broken; index the parts again"
                    )
            except BaseException:
                file.close()
                raise
            self._blocks[key] = file, samples
            if len(self._blocks) > BLOCKS:
                self._blocks.pop(next(iter(self._blocks)))[0].close()  # the one opened longest ago
        return dict(self._blocks[key][1][index])
