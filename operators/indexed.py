"""The manifest of a ``ShardSelect``: given, found beside the shards, or made once per node for local ones."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

from pipegraph.errors import DataError, GraphError
from pipegraph.storage import Manifest, Part, StoreClient, StoreError, build_manifest, expand_parts
from pipegraph.storage.indexing import IndexProgress
from pipegraph.storage.parts import is_url
from pipegraph.storage.pieces import SUFFIX

T = TypeVar("T")

_log = logging.getLogger("pipegraph.index")

MANY_PARTS: Final = 64
"""From so many parts on, indexing says how far it is."""

BESIDE: Final = "manifest.json"
"""The name under which ``pipegraph index`` writes a manifest, and under which one beside the shards is looked for."""


class Once(Generic[T]):
    """A value made at first need, shared by all copies of an operator. Any thread may call anything."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._value: list[T] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Once, (self._make,)  # a copied or pickled graph makes its own

    def get(self) -> T:
        """The value; whoever asks first makes it, others wait."""
        with self._lock:
            if not self._value:
                self._value.append(self._make())
            return self._value[0]

    def peek(self) -> T | None:
        """The value if it has been made."""
        return self._value[0] if self._value else None


def store_for(
    parts: Any, options: Mapping[str, Any]
) -> contextlib.AbstractContextManager[StoreClient | None]:
    """A store client for as long as these parts are listed, if any of them is remote."""
    names = [parts] if isinstance(parts, str | os.PathLike | Part) else list(parts)
    if any(is_url(name.uri if isinstance(name, Part) else os.fspath(name)) for name in names):
        return StoreClient(options)
    return contextlib.nullcontext()


class Found(NamedTuple):
    """A manifest, and the folder of its blocks' pieces, which may not be there; None where it lies nowhere."""

    manifest: Manifest
    pieces: str | None


def find_manifest(parts: Any, given: Any, options: Mapping[str, Any]) -> Found:
    """The manifest of these parts, in their order, and where it was found.

    Args:
        given: a manifest, its path or URL, or None: then one beside the shards is looked for, and for local
            parts one is made.
        options: of the store, for remote parts.

    Raises:
        GraphError: remote parts without a manifest.
        DataError: parts are missing, or not in the manifest.
    """
    if isinstance(given, Manifest):
        return Found(_of_parts(given, parts, options), None)
    if given is not None:
        where = os.fspath(given)
        if not is_url(where):
            return Found(_of_parts(Manifest.load(where), parts, options), where + SUFFIX)
        with StoreClient(options) as store:
            return Found(_of_parts(_read(where, store), parts, options), where + SUFFIX)
    with store_for(parts, options) as store:
        found = expand_parts(parts, store=store)
        beside = _beside(found, store)
    if beside is not None:
        return beside
    remote = next((part for part in found if not part.is_local), None)
    if remote is not None:
        raise GraphError(
            f"ShardSelect: remote parts such as {remote.name!r} need a manifest: run `pipegraph index PARTS` and pass "
            "manifest=, or use order=pg.order.PartOrder(), which needs none"
        )
    return Found(local_manifest(found), None)


def _beside(parts: Sequence[Part], store: StoreClient | None) -> Found | None:
    """``manifest.json`` in the folder of the parts, if it lists them as they are now."""
    folders = {part.uri.rpartition("/")[0] for part in parts}
    if len(folders) != 1:
        return None
    folder = folders.pop()
    try:
        if parts[0].is_local:
            path = os.path.join(folder, BESIDE)
            if not os.path.exists(path):
                return None
            newest = max(os.stat(part.uri).st_mtime_ns for part in parts)
            if os.stat(path).st_mtime_ns < newest:
                return None  # a shard was written after it
            manifest = Manifest.load(path)
        else:
            assert store is not None
            path = f"{folder}/{BESIDE}"
            manifest = _read(path, store)
        return Found(_chosen(manifest, parts), path + SUFFIX)
    except (StoreError, DataError):
        return None  # none there, not one of ours, or of other parts


def _read(url: str, store: StoreClient) -> Manifest:
    nbytes = store.head(url).size
    return Manifest.loads(store.read(url, 0, nbytes), None, url)


def _of_parts(manifest: Manifest, parts: Any, options: Mapping[str, Any]) -> Manifest:
    """A manifest's entries for the parts that are named, at the places where they are named."""
    with store_for(parts, options) as store:
        return _chosen(manifest, expand_parts(parts, store=store))


def _chosen(manifest: Manifest, parts: Sequence[Part]) -> Manifest:
    if [part.uri for part in manifest.parts] == [part.uri for part in parts]:
        return manifest
    by_uri = {part.uri: number for number, part in enumerate(manifest.parts)}
    by_name = {part.name: number for number, part in enumerate(manifest.parts)}
    if len(by_name) < len(manifest.parts):
        by_name = {}  # names alone do not tell them apart
    indexes = []
    for part in parts:
        number = by_uri.get(part.uri, by_name.get(part.name))
        if number is None:
            raise DataError(f"part {part.name!r} is not in the manifest {manifest!r}: index the parts again")
        index = manifest.part_index(number)
        indexes.append(replace(index, part=Part(part.uri, index.part.size)))
    return Manifest.of(indexes)


def cache_folder() -> Path:
    """Where pipegraph keeps what it can make again: ``$PIPEGRAPH_CACHE``, else the user's cache folder."""
    chosen = os.environ.get("PIPEGRAPH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipegraph"


def local_manifest(parts: Sequence[Part]) -> Manifest:
    """The manifest of local parts: headers only, in parallel, by one process of the node while others wait.

    Raises:
        ShardError: a part is broken; names it.
    """
    stamp = hashlib.blake2b(digest_size=16)
    for part in parts:
        status = os.stat(part.uri)
        stamp.update(
            f"{os.path.abspath(part.uri)}\0{part.uri}\0{status.st_size}\0{status.st_mtime_ns}\n".encode()
        )
    folder = cache_folder() / "manifests"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stamp.hexdigest()}.json"
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel ends it with the process, however that ends
        if path.exists():
            return Manifest.load(path)
        return build_manifest(list(parts), path, checksums=False, progress=_progress)
    finally:
        os.close(lock)


def _progress(state: IndexProgress) -> None:
    if state.parts >= MANY_PARTS and state.parts_done % max(1, state.parts // 20) == 0:
        _log.info("indexing shards: %d of %d, %d samples", state.parts_done, state.parts, state.samples)
