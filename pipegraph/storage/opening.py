"""Parts to readable files, wherever they lie."""

from __future__ import annotations

from pipegraph.errors import DataError

from .files import LocalFile, ShardFile
from .parts import Part
from .remote import RemoteFile
from .stores import StoreClient, safe_url


def open_part(part: Part, store: StoreClient | None = None, *, keep_nbytes: int = 0) -> ShardFile:
    """Open a part for reading; the caller closes it.

    Args:
        store: reads remote parts; it must outlive the file.
        keep_nbytes: as `RemoteFile`.

    Raises:
        DataError: a part is missing, or its size is not `part.size`.
    """
    if not part.is_local:
        if store is None:
            raise DataError(f"part {safe_url(part.uri)!r}: a remote part needs store=StoreClient(...)")
        return RemoteFile(part, store, keep_nbytes=keep_nbytes)
    try:
        file = LocalFile(part.uri)
    except OSError as error:
        raise DataError(f"part {part.uri!r}: cannot be opened: {error.strerror}") from error
    if part.size is not None and file.size != part.size:
        size = file.size
        file.close()
        raise DataError(
            f"part {part.uri!r}: has {size} bytes, its manifest says {part.size}; it was changed, index again"
        )
    return file
