"""The manifest of local parts, made once per node and kept in the user's cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from pipegraph.storage import Manifest, Part, build_manifest
from pipegraph.storage.indexing import IndexProgress

_log = logging.getLogger("pipegraph.index")

MANY_PARTS = 64
"""From so many parts on, indexing says how far it is."""


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
