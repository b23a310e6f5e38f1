"""Pins the version of each object that a client reads: the first one that it sees, and no other after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipegraph import concurrency
from pipegraph.errors import DataError, StoreError

from .parts import Part
from .urls import safe_url

_CHANGED: Final = "changed "
"""What the versions of objects without an etag begin with."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object: its size in bytes, and what identifies its version."""

    size: int
    # The etag, without quotes and the mark of weak ones, which stores write in one answer and leave out in the next;
    # where there is none the time of the last change in seconds, else an empty string.
    version: str

    @staticmethod
    def of(meta: Mapping[str, Any]) -> ObjectInfo:
        """From the client library's description of an object."""
        changed = meta["last_modified"]
        etag = (meta["e_tag"] or "").removeprefix("W/").strip('"')
        # The client's word for a server that names no time is the first second of 1970.
        time = f"{_CHANGED}{changed:%FT%T%z}" if changed is not None and changed.timestamp() else ""
        return ObjectInfo(meta["size"], etag or time)


class Versions:
    """Bytes of two versions never meet: each answer must be of the version that was expected or answered first.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        # Guarded by it: size, etag and time of the last change by URL; what has come to be known never changes.
        self._known: dict[str, tuple[int | None, str | None, str | None]] = {}

    def expect(self, part: Part) -> None:
        """What is known of a part without asking must hold for all answers."""
        if part.size is not None or part.version is not None:
            self._join(part.uri, part.size, part.version)

    def answered(self, url: str, info: ObjectInfo) -> None:
        """A store has said which object this is."""
        self._join(url, info.size, info.version)

    def _join(self, url: str, size: int | None, version: str | None) -> None:
        # What is neither is a time that nobody knows.
        is_time = not version or version.startswith(_CHANGED)
        etag, changed = (None, version) if is_time else (version, None)
        with self._lock:
            known_size, known_etag, known_changed = self._known.get(url, (None, None, None))
            # An answer that has only the one says nothing of the other.
            if _differ(etag, known_etag) or _differ(changed, known_changed):
                raise self.replaced(url)
            if size is not None and known_size is not None and size != known_size:
                raise DataError(
                    f"part {safe_url(url)!r}: has {size} bytes, its manifest says {known_size}; it was changed, "
                    "index again"
                )
            self._known[url] = (
                size if known_size is None else known_size,
                known_etag or etag,
                known_changed or changed,
            )

    def of(self, url: str) -> tuple[int | None, str | None]:
        """Size and version, as far as they are known."""
        with self._lock:
            size, etag, changed = self._known.get(url, (None, None, None))
        return size, etag or changed

    def forget(self, url: str) -> None:
        """It is written anew."""
        with self._lock:
            self._known.pop(url, None)

    def replaced(self, url: str) -> StoreError:
        """The error for an object that is another one than before."""
        return StoreError(
            f"{safe_url(url)}: the object was replaced while it was in use: its etag, or the time of its last change, "
            "differs. Index the parts again, and make the graph and its loader anew"
        )


def _differ(one: str | None, other: str | None) -> bool:
    return bool(one and other) and one != other
