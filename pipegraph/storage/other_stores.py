"""Stores of other schemes than those of obstore: one class each, and fsspec's filesystems through one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, final

from pipegraph.errors import extra_module
from pipegraph.forks import lock_free_after_fork

OBSTORE: Final = frozenset(
    "s3 s3a gs az adl azure abfs abfss http https memory file".split()  # of the extra `cloud`
)


class Store(Protocol):
    """Objects by URL. Several threads call it; a `ConnectionError` or a `TimeoutError` is tried again."""

    def read(self, path: str, start: int, stop: int) -> bytes:
        """The bytes start..stop of an object; all of them."""

    def size(self, path: str) -> int:
        """Of an object, in bytes; raises FileNotFoundError where there is none."""

    def list(self, path: str) -> Iterable[str]:
        """The URLs of all objects below a folder's URL, which ends in a slash, in its subfolders too."""


OpenStore = Callable[[str, dict[str, Any]], Store]
"""Opens the store at a root such as ``hdfs://host``, with the options of ``ShardSelect(store=...)``."""

_lock = lock_free_after_fork()
_stores: dict[str, OpenStore] = {}


def register_store(scheme: str, open: OpenStore) -> None:
    """In this process, read URLs of a scheme, such as ``"hdfs"``, through the `Store` of ``open(root, options)``.

    A scheme that is neither registered nor one of obstore's is read through fsspec.
    """
    with _lock:
        _stores[scheme] = open


def opener_of(root: str) -> OpenStore | None:
    """What opens the store at this root; None where obstore does."""
    scheme = root.partition("://")[0]
    with _lock:
        return _stores.get(scheme) or (None if scheme.lower() in OBSTORE else FsspecStore)


@final
class FsspecStore:
    """A filesystem of fsspec's: ``hf://``, ``hdfs://``, ``ftp://``, ``github://`` and many others."""

    def __init__(self, root: str, options: dict[str, Any]) -> None:
        core = extra_module("fsspec.core", "fsspec", f"reading {root.partition('://')[0]}:// URLs", "fsspec")
        self._files, _ = core.url_to_fs(root, **options)

    def read(self, path: str, start: int, stop: int) -> bytes:
        data: bytes = self._files.cat_file(self._files._strip_protocol(path), start=start, end=stop)
        return data

    def size(self, path: str) -> int:
        return int(self._files.size(self._files._strip_protocol(path)))

    def list(self, path: str) -> Iterable[str]:
        folder = self._files._strip_protocol(path).rstrip("/")
        return [f"{path}{found[len(folder) :].lstrip('/')}" for found in self._files.find(folder)]
