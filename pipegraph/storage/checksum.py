"""CRC-32C of byte strings, through google-crc32c."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Final

from pipegraph.errors import MissingExtraError

from .shard_files import ShardFile

# Large enough that calls do not count, small enough to stay in a core's cache.
_PIECE_NBYTES: Final = 1 << 20


@cache
def crc32c_extend() -> Callable[[int, bytes], int]:
    """``extend(crc, data) -> crc``."""
    try:
        extend: Callable[[int, bytes], int] = importlib.import_module("google_crc32c").extend
    except ImportError as error:
        raise MissingExtraError("google_crc32c", "shards", "checking shards") from error
    return extend


def file_crc32c(file: ShardFile, offset: int, nbytes: int, crc: int = 0) -> int:
    """The checksum of a range, continued from `crc`."""
    extend = crc32c_extend()
    for at in range(offset, offset + nbytes, _PIECE_NBYTES):
        crc = extend(crc, file.read_at(at, min(_PIECE_NBYTES, offset + nbytes - at)))
    return crc
