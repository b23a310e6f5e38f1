"""The index of local shards without a manifest: made once per node, and kept."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from pipegraph.errors import DataError, LoaderClosedError, PipegraphWarning, ShardError
from pipegraph.stopping import Stopping
from pipegraph.storage import Manifest, Part, build_manifest
from pipegraph.storage.filelock import exclusive
from pipegraph.storage.indexing import IndexProgress
from pipegraph.storage.parts import file_version

_log = logging.getLogger("pipegraph.index")

MANY_PARTS: Final = 64
"""From this number of parts on, indexing reports its progress."""


def cache_folder() -> Path:
    """Where pipegraph keeps what it can make again: ``$PIPEGRAPH_CACHE``, else the user's cache folder."""
    chosen = os.environ.get("PIPEGRAPH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipegraph"


def local_manifest(parts: Sequence[Part], stopping: Stopping | None = None) -> Manifest:
    """The manifest of local parts: headers only, in parallel, by one process of the node while others wait.

    A part that cannot be indexed to its end is warned of; what is broken in it fails where it is read.
    """
    stamp = hashlib.blake2b(digest_size=16)
    for part in parts:
        status = os.stat(part.uri)
        facts = f"{os.path.abspath(part.uri)}\0{part.uri}\0{status.st_size}\0{file_version(status)}\n"
        stamp.update(facts.encode("utf-8", "surrogateescape"))  # names need not be UTF-8
    build = partial(
        build_manifest, list(parts), checksums=False, progress=partial(_progress, stopping), broken=_warn_of
    )
    folder = cache_folder() / "manifests"
    path = folder / f"{stamp.hexdigest()}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        warnings.warn(
            f"ShardSelect: the index of the shards cannot be kept in {os.fspath(folder)!r} ({error.strerror}), so each "
            "process makes it anew: set PIPEGRAPH_CACHE to a folder that can be written to, or run `pipegraph index`",
            PipegraphWarning,
            stacklevel=2,
        )
        return build()
    try:
        alone = exclusive(lock)  # the kernel ends the lock with the process, however that ends
        with contextlib.suppress(FileNotFoundError, DataError):  # an empty or broken one is made anew
            return Manifest.load(path)
        if alone:
            return build(path)
        made = build()  # as others may too: what each saves is whole
        made.save(path)
        return made
    finally:
        os.close(lock)


def _warn_of(part: Part, error: ShardError) -> None:
    warnings.warn(
        f"ShardSelect: {part.name!r} is broken: what lies behind its last whole block counts as one sample that fails "
        f"where it is read, under the stage's on_error: {error}",
        PipegraphWarning,
        stacklevel=2,
    )


def _progress(stopping: Stopping | None, state: IndexProgress) -> None:
    if stopping is not None and stopping.is_set():
        raise LoaderClosedError("the pipeline was closed while its shards were indexed")
    if state.parts >= MANY_PARTS and state.parts_done % max(1, state.parts // 20) == 0:
        _log.info("indexing shards: %d of %d, %d samples", state.parts_done, state.parts, state.samples)
