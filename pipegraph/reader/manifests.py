"""The manifest of a ``ShardSelect``: given, found beside the shards, or made once per node for local ones."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from pipegraph.errors import DataError, GraphError, LoaderClosedError, PipegraphWarning, ShardError
from pipegraph.stopping import Stopping
from pipegraph.storage import Manifest, Part, build_manifest
from pipegraph.storage.beside import load_beside, missing_error, missing_shards, numbers_in
from pipegraph.storage.filelock import exclusive
from pipegraph.storage.formats import slash_note
from pipegraph.storage.indexing import IndexProgress
from pipegraph.storage.parts import Missing, expand_parts, file_version, is_url
from pipegraph.storage.stores import StoreClient

_log = logging.getLogger("pipegraph.index")

MANY_PARTS: Final = 64
"""From this number of parts on, indexing reports its progress."""

SKIP: Final = "; or read the others with ShardSelect(missing='skip')"


@contextlib.contextmanager
def store_for(
    parts: Any, options: Mapping[str, Any], stopping: Stopping | None = None
) -> Iterator[StoreClient | None]:
    """A store client for as long as these parts are listed, if any of them is remote; a stop ends its waits."""
    names = [parts] if isinstance(parts, str | os.PathLike | Part) else list(parts)
    if not any(is_url(name.uri if isinstance(name, Part) else os.fspath(name)) for name in names):
        yield None
        return
    with StoreClient(options) as store, (stopping or Stopping()).ending(store.interrupt):
        yield store


class Found(NamedTuple):
    """A manifest, and where it comes from."""

    manifest: Manifest
    place: str | None
    """Its path or URL; None where it lies nowhere."""
    made: str = ""
    """How it came about where it lies nowhere."""
    skipped: tuple[str, ...] = ()
    """Shards that it listed and that are missing."""

    def __str__(self) -> str:
        facts = (
            f"{len(self.manifest.parts)} parts, {self.manifest.blocks} blocks, {len(self.manifest)} samples"
        )
        return f"{(self.place and repr(self.place)) or self.made}: {facts}"


class Listed(NamedTuple):
    """The parts that are there, and the manifest beside them."""

    parts: list[Part]
    skipped: tuple[str, ...] = ()
    """Shards that the manifest lists and that are missing."""
    place: str | None = None
    manifest: Manifest | None = None


def list_parts(
    parts: Any, options: Mapping[str, Any], missing: Missing = "error", stopping: Stopping | None = None
) -> Listed:
    """The parts that are named, with the manifest that lies beside them and lists some of them."""
    with store_for(parts, options, stopping) as store:
        found = expand_parts(parts, store=store, missing=missing)
        try:
            beside = load_beside(found, store)
        except DataError as error:
            _warn_of_unused(error)
            beside = None
    if beside is None:
        return Listed(found)
    place, manifest = beside
    # A shard that was cut keeps its size: that it has another one fails where it is read, for each of its samples.
    listed = [None if n is None else manifest.parts[n].size for n in numbers_in(manifest.parts, found)]
    found = [
        replace(part, size=size) if part.is_local and (part.size or 0) < (size or 0) else part
        for part, size in zip(found, listed, strict=True)
    ]
    return Listed(found, _skipped(manifest.parts, repr(place), found, parts, missing), place, manifest)


def _skipped(
    listed: Sequence[Part], place: str, found: Sequence[Part], named: Any, missing: Missing
) -> tuple[str, ...]:
    gone = missing_shards(listed, found, named)
    if gone and missing != "skip":
        raise missing_error(place, len(listed), gone, SKIP)
    return tuple(gone)


def find_manifest(
    parts: Any,
    given: Any,
    options: Mapping[str, Any],
    missing: Missing = "error",
    stopping: Stopping | None = None,
) -> Found:
    """The manifest of these parts, in their order, and where it was found: ``given`` (itself, or its path or URL), or
    the one beside the shards; for local parts one is made.

    Raises:
        GraphError: remote parts without a manifest.
        DataError: parts are missing, or not in the manifest.
    """
    if given is not None:
        place = None if isinstance(given, Manifest) else os.fspath(given)
        if place is None:
            manifest = given
        else:
            with store_for(place, options, stopping) as store:
                manifest = Manifest.load(place, store)
        with store_for(parts, options, stopping) as store:
            found = expand_parts(parts, store=store, missing=missing)
        where = "the manifest" if place is None else repr(place)
        skipped = _skipped(manifest.parts, where, found, parts, missing)
        return Found(_chosen(manifest, found), place, "given as an object", skipped)
    listed = list_parts(parts, options, missing, stopping)
    found = listed.parts
    beside = _usable(listed)
    if beside is not None:
        return beside
    remote = next((part for part in found if not part.is_local), None)
    if remote is not None:
        raise GraphError(
            f"ShardSelect: remote parts such as {remote.name!r} need a manifest: run `pipegraph index PARTS` and pass "
            f"manifest=, or use order=pg.order.PartOrder(), which needs none{slash_note(remote)}"
        )
    made = replace(local_manifest(found, stopping), parts=tuple(found))
    if not len(made) and any(part.size for part in found):
        they_hold = "and the others hold" if len(found) > 1 else "holds"
        warnings.warn(
            f"ShardSelect: {found[0].name!r} {they_hold} no samples, so that epochs are empty "
            "(in a tar, files without an extension belong to no sample)",
            PipegraphWarning,
            stacklevel=2,
        )
    return Found(made, None, "made from the headers of the shards as they are now", listed.skipped)


def _usable(listed: Listed) -> Found | None:
    """The manifest beside parts, if it lists all of them as they are; a warning where it lists others."""
    parts, skipped, place, manifest = listed
    if manifest is None or place is None:
        return None
    try:
        if parts[0].is_local:
            written = os.stat(place).st_mtime_ns
            newer = next((part.name for part in parts if _written(part) > written), None)
            if newer is not None:
                raise DataError(
                    f"{newer!r} was written after it; index again, or `touch` it where it is right"
                )
        return Found(_chosen(manifest, parts), place, skipped=skipped)
    except DataError as error:
        _warn_of_unused(f"{place!r} is not used: {error}")
        return None


def _written(part: Part) -> int:
    """When, unless it was cut."""
    status = os.stat(part.uri)
    return status.st_mtime_ns if status.st_size == part.size else 0


def _warn_of_unused(why: object) -> None:
    warnings.warn(f"ShardSelect: {why}", PipegraphWarning, stacklevel=2)


def _chosen(manifest: Manifest, parts: Sequence[Part]) -> Manifest:
    """The manifest's entries for these parts, at the places where they lie."""
    numbers, placed = [], []
    for part, number in zip(parts, numbers_in(manifest.parts, parts), strict=True):
        if number is None:
            raise DataError(
                f"part {part.name!r} is not in the manifest {manifest!r}: index the parts again{slash_note(part)}"
            )
        size = manifest.parts[number].size
        if part.size is not None and part.size != size:
            raise DataError(
                f"part {part.name!r} has {part.size} bytes, its manifest says {size}; it was changed, index again"
            )
        numbers.append(number)
        placed.append(replace(part, size=size))
    if numbers == list(range(len(manifest.parts))):
        return replace(manifest, parts=tuple(placed))
    indexes = [replace(manifest.part_index(n), part=part) for n, part in zip(numbers, placed, strict=True)]
    return Manifest.of(indexes, manifest.classes)


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
