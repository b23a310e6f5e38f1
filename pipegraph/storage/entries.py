"""Entries of a node cache, by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Cacheable:
    """What may be cached: a range of a part, with what is known of the part.

    Of several versions of the same bytes a cache keeps the newest.
    """

    uri: str
    nbytes: int
    offset: int = 0
    part_nbytes: int | None = None
    version: str | None = None
    crc32c: int | None = None

    @cached_property
    def place(self) -> str:
        """What the names of all versions of this entry begin with: a hash of which bytes are meant."""
        return _hash([self.uri, self.offset, self.nbytes, self.crc32c], 20)

    @cached_property
    def name(self) -> str:
        """The entry's file name: hashes, so that nothing of a URI reaches the file system."""
        return self.place + _hash([self.part_nbytes, self.version], 8)


def _hash(facts: list[str | int | None], nbytes: int) -> str:
    text = json.dumps(facts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=nbytes).hexdigest()


Write = Callable[[int, bytes], None]
"""Takes bytes of a download and where they belong; called in any order."""

Download = Callable[[Write], None]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Of one `NodeCache`, since it was made. Usage is on disk: see `NodeCache.usage`."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    downloaded_nbytes: int = 0
