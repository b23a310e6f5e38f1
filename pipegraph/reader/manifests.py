"""The parts that a ``ShardSelect`` names, and their manifest: given, found beside them, or made for local ones."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from pipegraph.errors import DataError, GraphError, LoaderClosedError, PipegraphWarning, StoreError
from pipegraph.stopping import Stopping
from pipegraph.storage import Manifest, Part, build_manifest
from pipegraph.storage.indexing import IndexProgress
from pipegraph.storage.locks import LOCK_EX, flock
from pipegraph.storage.parts import (
    MANIFEST,
    PartsLike,
    expand_braces,
    expand_parts,
    file_version,
    glob_regex,
    has_magic,
    is_url,
)
from pipegraph.storage.stores import StoreClient


class Found(NamedTuple):
    """The parts that are there, and their manifest, as far as it is known."""

    parts: Sequence[Part]
    manifest: Manifest | None = None
    origin: str = ""
    """Where the manifest lies, or how it came about."""

    def __str__(self) -> str:
        return f"{self.origin}: {self.manifest!r}"


@contextlib.contextmanager
def _store_for(
    names: Sequence[Any], options: Mapping[str, Any], stopping: Stopping | None
) -> Iterator[StoreClient | None]:
    """A store client for as long as these are looked up, if any of them is remote; a stop ends its waits."""
    if not any(is_url(name.uri if isinstance(name, Part) else os.fspath(name)) for name in names):
        yield None
        return
    with StoreClient(options) as store, (stopping or Stopping()).ending(store.interrupt):
        yield store


def list_parts(
    named: PartsLike,
    given: Manifest | str | None,
    options: Mapping[str, Any],
    stopping: Stopping | None = None,
) -> Found:
    """The parts that are named, with the manifest that was given (itself, or its path or URL), or that lies beside them
    and lists some of them.

    Raises:
        DataError: parts are missing.
    """
    names = [named] if isinstance(named, str | os.PathLike) else list(named)
    place = given if isinstance(given, str) else None
    with _store_for([*names, *([] if place is None else [place])], options, stopping) as store:
        parts = expand_parts(named, store=store)
        if isinstance(given, Manifest):
            manifest: Manifest | None = given
        elif place is not None:
            manifest = Manifest.load(place, store)
        else:
            place = manifest_beside(parts)
            manifest = _beside(place, parts, store)
    if manifest is None:
        return Found(parts)
    numbers = _numbers_in(manifest.parts, parts)
    gone = _missing_shards(manifest.parts, parts, numbers, names)
    if gone:
        shown = ", ".join(map(repr, gone[:5])) + (f" and {len(gone) - 5} more" if len(gone) > 5 else "")
        raise DataError(
            f"{len(gone)} of the {len(manifest.parts)} shards that {repr(place) if place else 'the manifest'} lists "
            f"are missing: {shown}. Copy them again, or run `pipegraph index` if they are not to be read any more"
        )
    # A shard that was cut keeps its size: that it has another one fails where it is read, for each of its samples.
    sizes = [None if number is None else manifest.parts[number].size for number in numbers]
    parts = [
        replace(part, size=size) if part.is_local and (part.size or 0) < (size or 0) else part
        for part, size in zip(parts, sizes, strict=True)
    ]
    return Found(parts, manifest, repr(place) if place else "given as an object")


def find_manifest(
    named: PartsLike,
    given: Manifest | str | None,
    options: Mapping[str, Any],
    stopping: Stopping | None = None,
) -> Found:
    """As `list_parts`, with the manifest's entries for these parts in their order; for local parts one is made.

    Raises:
        GraphError: remote parts without a manifest.
        DataError: parts are missing, or not in the manifest.
    """
    found = list_parts(named, given, options, stopping)
    parts = found.parts
    if found.manifest is not None:
        try:
            return found._replace(manifest=_chosen(found.manifest, parts))
        except DataError as error:
            if given is not None:
                raise
            _warn_of_unused(f"{found.origin} is not used: {error}")
    remote = next((part for part in parts if not part.is_local), None)
    if remote is not None:
        raise GraphError(
            f"ShardSelect: remote parts such as {remote.name!r} need a manifest: run `pipegraph index PARTS` and pass "
            f"manifest=, or use order=pg.order.PartOrder(), which needs none"
        )
    made = replace(local_manifest(parts, stopping), parts=tuple(parts))
    if not len(made) and any(part.size for part in parts):
        they_hold = "and the others hold" if len(parts) > 1 else "holds"
        warnings.warn(
            f"ShardSelect: {parts[0].name!r} {they_hold} no samples, so that epochs are empty "
            "(in a tar, files without an extension belong to no sample)",
            PipegraphWarning,
            stacklevel=2,
        )
    return Found(parts, made, "made from the headers of the shards as they are now")


def _chosen(manifest: Manifest, parts: Sequence[Part]) -> Manifest:
    """The manifest's entries for these parts, at the places where they lie."""
    numbers, placed = [], []
    for part, number in zip(parts, _numbers_in(manifest.parts, parts), strict=True):
        if number is None:
            raise DataError(f"part {part.name!r} is not in the manifest {manifest!r}: index the parts again")
        size = manifest.parts[number].size
        if part.size is not None and part.size != size:
            raise DataError(
                f"part {part.name!r} has {part.size} bytes, its manifest says {size}; it was changed, index again"
            )
        numbers.append(number)
        placed.append(replace(part, size=size))
    return manifest.chosen(numbers, placed)


def _warn_of_unused(why: object) -> None:
    warnings.warn(f"ShardSelect: {why}", PipegraphWarning, stacklevel=2)


def manifest_beside(parts: Sequence[Part]) -> str | None:
    """Where the manifest of these parts is written and looked for: in their folder, if that is one."""
    folders = {_folder(part) for part in parts}
    if len(folders) != 1:
        return None
    folder = folders.pop()
    return os.path.join(folder, MANIFEST) if parts[0].is_local else f"{folder}/{MANIFEST}"


def _beside(path: str | None, parts: Sequence[Part], store: StoreClient | None) -> Manifest | None:
    """The manifest that lies beside these parts and lists some of them; a warning where it cannot be read."""
    if path is None:
        return None
    try:
        manifest = Manifest.load(path, store)
    except FileNotFoundError:
        return None
    except (StoreError, DataError) as error:
        if getattr(error, "errno", None) != errno.ENOENT:  # some stores forbid what is not there
            _warn_of_unused(f"{path!r} is not used: {error}")
        return None
    return manifest if any(number is not None for number in _numbers_in(manifest.parts, parts)) else None


def _numbers_in(listed: Sequence[Part], parts: Sequence[Part]) -> list[int | None]:
    """The numbers of these parts in the list of a manifest: by place, else by name."""
    by_place = {_place(part): number for number, part in enumerate(listed)}
    by_name = {part.name: number for number, part in enumerate(listed)}
    if len(by_name) < len(listed):
        by_name = {}  # names alone do not distinguish them
    return [by_place.get(_place(part), by_name.get(part.name)) for part in parts]


def _missing_shards(
    listed: Sequence[Part], found: Sequence[Part], numbers: Sequence[int | None], named: Sequence[Any]
) -> list[str]:
    """The listed shards that are neither among those found nor, though not named, there.

    Of a store's objects only those are looked for that a folder or a pattern names.
    """
    # Shards may lie elsewhere than when they were indexed.
    moved = {
        _folder(listed[number]): _folder(part)
        for part, number in zip(found, numbers, strict=True)
        if number is not None
    }
    patterns = [
        re.compile(glob_regex(f"{each}*" if each.endswith("/") else each))
        for text in (os.fspath(name) for name in named if not isinstance(name, Part))
        if is_url(text)
        for each in expand_braces(text)
        if each.endswith("/") or has_magic(each)
    ]
    gone, known = [], set(numbers)
    for part in (part for number, part in enumerate(listed) if number not in known):
        place = _place(Part(f"{moved.get(_folder(part), _folder(part))}/{part.name}"))
        if any(each.fullmatch(place) for each in patterns) if is_url(place) else not os.path.exists(place):
            gone.append(part.name)
    return gone


def _folder(part: Part) -> str:
    return part.uri.rpartition("/")[0]


def _place(part: Part) -> str:
    """The same for a file however it is named."""
    return os.path.abspath(part.uri) if part.is_local else part.uri


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
    """The manifest of local parts: headers only, in parallel, by one process of the node while others wait."""
    stamp = hashlib.blake2b(digest_size=16)
    for part in parts:
        status = os.stat(part.uri)
        facts = f"{os.path.abspath(part.uri)}\0{part.uri}\0{status.st_size}\0{file_version(status)}\n"
        stamp.update(facts.encode("utf-8", "surrogateescape"))  # names need not be UTF-8
    build = partial(build_manifest, list(parts), checksums=False, progress=partial(_progress, stopping))
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
        with contextlib.suppress(
            OSError
        ):  # where there are no locks, others may index too: what each saves is whole
            flock(lock, LOCK_EX)  # the kernel ends it with the process, however that ends
        with contextlib.suppress(FileNotFoundError, DataError):  # an empty or broken one is made anew
            return Manifest.load(path)
        return build(path)
    finally:
        os.close(lock)


def _progress(stopping: Stopping | None, state: IndexProgress) -> None:
    if stopping is not None and stopping.is_set():
        raise LoaderClosedError("the pipeline was closed while its shards were indexed")
    if state.parts >= MANY_PARTS and state.parts_done % max(1, state.parts // 20) == 0:
        _log.info("indexing shards: %d of %d, %d samples", state.parts_done, state.parts, state.samples)
