"""Builds manifests in parallel."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Final

from pipegraph.errors import DataError, note
from pipegraph.integers import flag
from pipegraph.paths import path_of
from pipegraph.storage.formats.shard_format import BLOCK_NBYTES

from .formats import format_of
from .manifest import Manifest, PartIndex
from .part_files import open_part
from .parts import Part, PartsLike, expand_parts, is_url
from .shard_files import ShardFile, crc32c_extend, file_crc32c
from .stores import StoreClient

MAX_BLOCKS: Final = 1_000_000
"""Orders and readers keep a table of all blocks: 20 bytes each."""


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """How far `build_manifest` is.

    Args:
        parts_done, parts: of how many.
        samples: in the parts done.
    """

    parts_done: int
    parts: int
    samples: int


def index_part(
    part: Part,
    file: ShardFile,
    *,
    checksums: bool = True,
    block_nbytes: int = BLOCK_NBYTES,
) -> PartIndex:
    """Find the blocks of one part, and on the same pass its checksums, without which only headers are read where the
    format allows it.
    """
    form = format_of(part)
    size = Part(part.uri, file.size)
    blocks, crcs = [], []
    if not checksums:
        return PartIndex(size, tuple(form.index(file, block_nbytes)))
    part_crc, hashed = 0, 0
    for block in form.index(file, block_nbytes):
        blocks.append(block)
        crcs.append(file_crc32c(file, block.offset, block.nbytes))
        # Blocks may leave gaps (headers) or overlap: the part's own checksum goes over every byte once.
        end = block.offset + block.nbytes
        if end > hashed:
            part_crc = file_crc32c(file, hashed, end - hashed, part_crc)
            hashed = end
    part_crc = file_crc32c(file, hashed, file.size - hashed, part_crc)
    return PartIndex(size, tuple(blocks), part_crc, tuple(crcs))


def build_manifest(
    parts: PartsLike,
    path: str | os.PathLike[str] | None = None,
    *,
    store: StoreClient | Mapping[str, Any] | None = None,
    workers: int = 8,
    checksums: bool = True,
    block_nbytes: int | None = None,
    progress: Callable[[IndexProgress], None] | None = None,
) -> Manifest:
    """Index parts and, with `path`, write the manifest there.

    Args:
        store: for remote parts, or its options as for ``ShardSelect(store=...)``; what is missing comes from the
            environment.
        workers: parts read at the same time.
        checksums: read every byte for CRC-32C of parts and blocks.
        block_nbytes: about how large blocks are; None: 8 MB, or what makes `MAX_BLOCKS` of a larger dataset.
        progress: called in this thread after each part.

    Raises:
        ShardError: a part is broken; the other parts in flight are finished first.
        DataError: as `expand_parts`, or there is no folder for the manifest.
    """
    checksums = flag(checksums, "build_manifest: checksums")
    if checksums:
        crc32c_extend()
    with contextlib.ExitStack() as stack:
        if isinstance(store, Mapping):
            store = stack.enter_context(StoreClient(store))
        found = expand_parts(parts, store=store)
        path = None if path is None else path_of(path, "build_manifest: path")
        remote = path is not None and is_url(path)
        if store is None and (remote or not all(part.is_local for part in found)):
            store = stack.enter_context(StoreClient())
        if path is not None and not remote:
            folder = os.path.dirname(path) or "."
            if os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
                raise DataError(
                    f"{path!r} cannot be written: name a file in a folder that is there and can be written to"
                )
        if block_nbytes is None:
            block_nbytes = max(BLOCK_NBYTES, sum(part.size or 0 for part in found) // MAX_BLOCKS)

        def run(part: Part) -> PartIndex:
            # A block's bytes are read a second time, for their checksum.
            with open_part(part, store, keep_nbytes=block_nbytes + block_nbytes // 2) as file:
                return index_part(part, file, checksums=checksums, block_nbytes=block_nbytes)

        done: dict[int, PartIndex] = {}
        samples = 0
        if progress:
            progress(IndexProgress(0, len(found), 0))
        with ThreadPoolExecutor(workers, thread_name_prefix="pipegraph-index") as pool:
            numbers = {pool.submit(run, part): number for number, part in enumerate(found)}
            try:
                for future in as_completed(numbers):
                    number = numbers.pop(future)
                    try:
                        done[number] = future.result()
                    except Exception as error:
                        note(error, f"while indexing {found[number].uri!r}")
                        raise
                    samples += done[number].samples
                    if progress:
                        progress(IndexProgress(len(done), len(found), samples))
            finally:  # after a failure no further part is begun
                pool.shutdown(cancel_futures=True)
        manifest = Manifest.of([done[number] for number in range(len(found))])
        if path is not None:
            manifest.save(path, store if remote else None)
        return manifest
