"""Opens parts as readable files, local or remote."""

from __future__ import annotations

import os
from dataclasses import replace

from pipegraph.errors import DataError

from .object_file import RemoteFile
from .parts import Part, file_version, written_again
from .shard_files import LocalFile, ShardFile
from .stores import StoreClient, safe_url


def identify(part: Part, store: StoreClient | None = None) -> Part:
    """The part with its size and version; a store is asked where it has not said them yet."""
    if not part.is_local:
        return _needed(part, store).identify(part)
    try:
        status = os.stat(part.uri)
    except OSError as error:
        raise DataError(f"part {part.uri!r}: cannot be opened: {error.strerror}") from error
    _check(part, status)
    return replace(part, size=status.st_size, version=file_version(status))


def open_part(part: Part, store: StoreClient | None = None, *, keep_nbytes: int = 0) -> ShardFile:
    """Open a part for reading; the caller closes it.

    Args:
        store: reads remote parts; it must outlive the file.
        keep_nbytes: as `RemoteFile`.

    Raises:
        DataError: a part is missing, or its size or version is not the one it should have.
    """
    if not part.is_local:
        return RemoteFile(part, _needed(part, store), keep_nbytes=keep_nbytes)
    try:
        file = LocalFile(part.uri)
    except OSError as error:
        raise DataError(f"part {part.uri!r}: cannot be opened: {error.strerror}") from error
    try:
        _check(part, file.status)
    except DataError:
        file.close()
        raise
    return file


def _needed(part: Part, store: StoreClient | None) -> StoreClient:
    if store is None:
        raise DataError(f"part {safe_url(part.uri)!r}: a remote part needs store=StoreClient(...)")
    return store


def _check(part: Part, status: os.stat_result) -> None:
    if part.size is not None and status.st_size != part.size:
        why = (
            "was changed: " if status.st_size > part.size else "was cut short or changed: copy it again, or "
        )
        raise DataError(
            f"part {part.uri!r}: has {status.st_size} bytes, its manifest says {part.size}; it {why}index again"
        )
    if part.version is not None and written_again(part.version, status):
        raise DataError(
            f"part {part.uri!r}: was written again since it was looked up; index the parts again, and make the graph "
            "and its loader anew"
        )
