"""Pins the version of each object that a client reads: the first one that it sees, and no other after it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipegraph.errors import DataError, StoreError

from .parts import Part
from .urls import safe_url


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object: its size in bytes, and what identifies its version.

    Args:
        version: the etag; where the store gives none the time of the last change, else an empty string.
    """

    size: int
    version: str

    @staticmethod
    def of(meta: Mapping[str, Any]) -> ObjectInfo:
        """From the client library's description of an object."""
        changed = meta["last_modified"]
        version = meta["e_tag"] or (f"changed {changed.isoformat()}" if changed is not None else "")
        return ObjectInfo(meta["size"], version)


def as_etag(version: str | None) -> str | None:
    """What ``If-Match`` can be asked with: weak etags never match, and times are none."""
    return None if not version or version.startswith(("W/", "changed ")) else version


class Versions:
    """Bytes of two versions never meet: each answer must be of the version that was expected or answered first.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by it: what is known by URL; what has come to be known never changes.
        self._known: dict[str, tuple[int | None, str | None]] = {}

    def expect(self, part: Part) -> None:
        """What is known of a part without asking must hold for all answers."""
        if part.size is not None or part.version is not None:
            self._join(part.uri, part.size, part.version)

    def answered(self, url: str, info: ObjectInfo) -> None:
        """A store has said which object this is.

        Raises:
            DataError: it has another size than was expected, most often by a manifest.
            StoreError: it is not the version that was there before.
        """
        self._join(url, info.size, info.version)

    def _join(self, url: str, size: int | None, version: str | None) -> None:
        with self._lock:
            known_size, known_version = self._known.get(url, (None, None))
            if None not in (known_version, version) and known_version != version:
                raise self.replaced(url)
            if size is not None and known_size is not None and size != known_size:
                raise DataError(
                    f"part {safe_url(url)!r}: has {size} bytes, its manifest says {known_size}; it was changed, "
                    "index again"
                )
            self._known[url] = (
                size if known_size is None else known_size,
                version if known_version is None else known_version,
            )

    def of(self, url: str) -> tuple[int | None, str | None]:
        """Size and version, as far as they are known."""
        with self._lock:
            return self._known.get(url, (None, None))

    def forget(self, url: str) -> None:
        """It is written anew."""
        with self._lock:
            self._known.pop(url, None)

    def replaced(self, url: str) -> StoreError:
        """The error for an object that is another one than before."""
        return StoreError(
            f"{safe_url(url)}: the object was replaced while it was in use: its etag is not the one it had. Index the "
            "parts again, and make the graph and its loader anew"
        )
