"""Builds manifests in parallel; an interrupted build resumes."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from pipegraph.errors import DataError, PipegraphWarning, ShardError, note
from pipegraph.integers import flag
from pipegraph.paths import path_of
from pipegraph.storage.formats.shard_format import BLOCK_NBYTES, Block

from .filelock import NO_LOCKS, Journal
from .formats import Format, format_of
from .manifest import Manifest, PartIndex
from .object_file import open_part
from .parts import Part, PartsLike, expand_parts, file_version, is_url
from .shard_files import ShardFile, crc32c_extend, file_crc32c
from .stores import StoreClient

MAX_BLOCKS: Final = 1_000_000
"""Orders and readers keep a table of all blocks: 20 bytes each."""

_NOT_WRITTEN: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
"""Of a folder that is not there, or that nothing may be written to."""

Broken = Callable[[Part, ShardError], None]


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """How far `build_manifest` is; parts taken over from a stopped run count as done.

    Args:
        parts_done, parts: of how many.
        nbytes_done: bytes of the parts done.
        samples: in the parts done.
        latest: uri of the part done last, None at the start.
    """

    parts_done: int
    parts: int
    nbytes_done: int
    samples: int
    latest: str | None


def index_part(
    part: Part,
    file: ShardFile,
    form: Format | None = None,
    *,
    checksums: bool = True,
    block_nbytes: int = BLOCK_NBYTES,
    broken: Broken | None = None,
) -> PartIndex:
    """Find the blocks of one part, and on the same pass its checksums, without which only headers are read where the
    format allows it. `broken` as in `build_manifest`.
    """
    form = form or format_of(part)
    size = Part(part.uri, file.size)
    blocks, crcs = [], []
    if not checksums:
        return PartIndex(size, tuple(_blocks(form, part, file, block_nbytes, broken)))
    part_crc, hashed = 0, 0
    for block in _blocks(form, part, file, block_nbytes, broken):
        blocks.append(block)
        crcs.append(file_crc32c(file, block.offset, block.nbytes))
        # Blocks may leave gaps (headers) or overlap: the part's own checksum goes over every byte once.
        end = block.offset + block.nbytes
        if end > hashed:
            part_crc = file_crc32c(file, hashed, end - hashed, part_crc)
            hashed = end
    part_crc = file_crc32c(file, hashed, file.size - hashed, part_crc)
    return PartIndex(size, tuple(blocks), part_crc, tuple(crcs))


def _blocks(
    form: Format, part: Part, file: ShardFile, block_nbytes: int, broken: Broken | None
) -> Iterator[Block]:
    end = samples = 0
    try:
        for block in form.index(file, block_nbytes):
            yield block
            end, samples = block.offset + block.nbytes, block.first + block.samples
    except ShardError as error:
        if broken is None:
            raise
        rest = Block(end, file.size - end, samples, 1)
        if not _is_refused(form, file, rest):
            raise  # it would be delivered as a sample
        broken(part, error)
        yield rest


def _is_refused(form: Format, file: ShardFile, block: Block) -> bool:
    """Whether reading a block fails, as it must for what is broken."""
    try:
        form.read(file, block)[0]
    except Exception:
        return True
    return False


def build_manifest(
    parts: PartsLike,
    path: str | os.PathLike[str] | None = None,
    *,
    form: Format | None = None,
    store: StoreClient | Mapping[str, Any] | None = None,
    workers: int = 8,
    checksums: bool = True,
    block_nbytes: int | None = None,
    progress: Callable[[IndexProgress], None] | None = None,
    broken: Broken | None = None,
    journal: str | os.PathLike[str] | None = None,
) -> Manifest:
    """Index parts and, with `path`, write the manifest there.

    With `path`, what is done lies in ``<path>.partial`` as it is done: the same call
    after a crash or an interrupt reads only the rest. A part is read again
    if its size or modification time changed.

    Args:
        form: of all parts; else by each part's suffix.
        store: for remote parts, or its options as for ``ShardSelect(store=...)``; what is missing comes from the
            environment.
        workers: parts read at the same time.
        checksums: read every byte for CRC-32C of parts and blocks.
        block_nbytes: about how large blocks are; None: 8 MB, or what makes `MAX_BLOCKS` of a larger dataset.
        progress: called in this thread after each part.
        broken: gets each part that cannot be indexed to its end, and why. What comes behind the last block that was
            found is then one block of one sample, whose reading fails; without `broken` the part is an error.
        journal: where parts that are done are noted; by default ``<path>.partial`` beside a manifest on disk. For one
            that is written to a store there is none by default: a stopped run begins anew.

    Raises:
        ShardError: a part is broken; the other parts in flight are finished first.
        DataError: as `expand_parts`, another process is writing this manifest, or nothing can be written there.
    """
    checksums = flag(checksums, "build_manifest: checksums")
    if checksums:
        crc32c_extend()
    with contextlib.ExitStack() as stack:
        if isinstance(store, Mapping):
            store = stack.enter_context(StoreClient(store))
        found = expand_parts(parts, store=store)
        path = None if path is None else path_of(path, "build_manifest: path")
        journal = None if journal is None else path_of(journal, "build_manifest: journal")
        remote = path is not None and is_url(path)
        if store is None and (remote or not all(part.is_local for part in found)):
            store = stack.enter_context(StoreClient())
        if path is not None and not remote and os.path.isdir(path):
            raise DataError(f"{path!r} is a folder: name a file in it for the manifest")
        if journal is None and path is not None and not remote:
            journal = path + ".partial"
        notes = None
        if journal is not None:
            refusal = f"{path or journal}: another process is writing this manifest"
            notes = stack.enter_context(_journal(journal, refusal))
        if block_nbytes is None:
            block_nbytes = max(BLOCK_NBYTES, sum(part.size or 0 for part in found) // MAX_BLOCKS)
        settings = [block_nbytes, checksums]

        def run(part: Part) -> PartIndex:
            # A block's bytes are read a second time, for their checksum.
            with open_part(part, store, keep_nbytes=block_nbytes + block_nbytes // 2) as file:
                return index_part(
                    part, file, form, checksums=checksums, block_nbytes=block_nbytes, broken=broken
                )

        done = _known(notes, found, settings) if notes else {}
        todo = [number for number in range(len(found)) if number not in done]
        nbytes = sum(i.part.size or 0 for i in done.values())
        samples = sum(i.samples for i in done.values())
        if progress:
            progress(IndexProgress(len(done), len(found), nbytes, samples, None))
        for number, index in _in_parallel(run, found, todo, workers):
            done[number] = index
            if notes:
                notes.note({"of": _stamp(found[number], settings), "index": index.to_json()})
            nbytes, samples = nbytes + (index.part.size or 0), samples + index.samples
            if progress:
                progress(IndexProgress(len(done), len(found), nbytes, samples, index.part.uri))
        manifest = Manifest.of([done[number] for number in range(len(found))])
        if path is not None:
            manifest.save(path, store if remote else None)
        if notes:
            notes.remove()
        return manifest


def _journal(path: str | os.PathLike[str], refusal: str) -> AbstractContextManager[Journal | None]:
    """The notes of a run; none where a lock could not keep other processes out of them."""
    try:
        return Journal(path, refusal)
    except OSError as error:
        if error.errno in _NOT_WRITTEN:
            raise DataError(
                f"{os.fspath(path)!r} cannot be written ({error.strerror}): name a file in a folder that is there and "
                "can be written to"
            ) from error
        if error.errno not in NO_LOCKS:
            raise
    warnings.warn(
        f"{os.fspath(path)}: this file system has no file locks, so a run that is stopped begins anew; to continue it, "
        "give journal= a path on another file system",
        PipegraphWarning,
        stacklevel=4,
    )
    return contextlib.nullcontext()


def _in_parallel(
    run: Callable[[Part], PartIndex], parts: Sequence[Part], numbers: Sequence[int], workers: int
) -> Iterator[tuple[int, PartIndex]]:
    """Results as they come. After a failure no further part is begun."""
    pending: dict[Future[PartIndex], int] = {}
    left = iter(numbers)
    with ThreadPoolExecutor(workers, thread_name_prefix="pipegraph-index") as pool:
        failure: Exception | None = None
        while True:
            while failure is None and len(pending) < 2 * workers and (number := next(left, None)) is not None:
                pending[pool.submit(run, parts[number])] = number
            if not pending:
                break
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                number = pending.pop(future)
                try:
                    result = future.result()
                except Exception as error:
                    note(error, f"while indexing {parts[number].uri!r}")
                    failure = error if failure is None else failure
                else:
                    yield number, result
        if failure is not None:
            raise failure


def _known(journal: Journal, parts: Sequence[Part], settings: list[Any]) -> dict[int, PartIndex]:
    """The parts that a stopped run has finished, and that are unchanged since, by number."""
    noted: dict[str, tuple[Any, PartIndex]] = {}
    for record in journal.records:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            noted[record["index"]["uri"]] = (record["of"], PartIndex.from_json(record["index"]))
    return {
        number: noted[part.uri][1]
        for number, part in enumerate(parts)
        if part.uri in noted and noted[part.uri][0] == _stamp(part, settings)
    }


def _stamp(part: Part, settings: list[Any]) -> list[Any]:
    """What shows that a part is unchanged, by size and version, and was indexed with the same settings."""
    version = part.version
    if version is None and part.is_local:
        version = file_version(os.stat(part.uri))
    return [part.size, version, *settings]
