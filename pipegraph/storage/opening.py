"""Parts to readable files, wherever they lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipegraph.errors import DataError

from .files import LocalFile, ShardFile
from .parts import Part


def open_part(part: Part, store: Mapping[str, Any] | None = None) -> ShardFile:
    """Open a part for reading; the caller closes it.

    Args:
        store: options of the object store, for a remote part.

    Raises:
        DataError: a local part is missing, or its size is not `part.size`.
    """
    if not part.is_local:
        raise DataError(f"part {part.uri!r}: remote parts need a store")
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
