"""The manifest that lies beside shards, and the shards that a manifest lists and that are not there."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from pipegraph.errors import DataError, StoreError

from .manifest import Manifest
from .parts import Part, PartsLike, expand_braces, has_magic, is_url, local_path
from .side_files import MANIFEST, OLD_MANIFEST
from .stores import StoreClient
from .urls import glob_regex


def manifest_beside(parts: Sequence[Part], name: str = MANIFEST) -> str | None:
    """Where the manifest of these parts is written and looked for: in their folder, if that is one."""
    folders = {_folder(part) for part in parts}
    if len(folders) != 1:
        return None
    folder = folders.pop()
    return os.path.join(folder, name) if parts[0].is_local else f"{folder}/{name}"


def load_beside(parts: Sequence[Part], store: StoreClient | None = None) -> tuple[str, Manifest] | None:
    """The manifest that lies beside these parts and lists some of them, and its place.

    Raises:
        DataError: it is none, or of another version, or the store does not give it.
    """
    refused = None
    for name in (MANIFEST, OLD_MANIFEST):
        path = manifest_beside(parts, name)
        if path is not None:
            try:
                manifest = Manifest.load(path, store)
            except FileNotFoundError:
                continue
            except StoreError as error:  # some stores forbid what is not there
                refused = (
                    refused if error.errno == errno.ENOENT else DataError(f"{path!r} is not used: {error}")
                )
                continue
            except DataError as error:
                raise DataError(f"{path!r} is not used: {error}") from error
            if any(number is not None for number in numbers_in(manifest, parts)):
                return path, manifest
    if refused is not None:
        raise refused
    return None


def numbers_in(manifest: Manifest, parts: Sequence[Part]) -> list[int | None]:
    """The numbers that the manifest gives these parts: by place, else by name."""
    by_place = {_place(part): number for number, part in enumerate(manifest.parts)}
    by_name = {part.name: number for number, part in enumerate(manifest.parts)}
    if len(by_name) < len(manifest.parts):
        by_name = {}  # names alone do not distinguish them
    return [by_place.get(_place(part), by_name.get(part.name)) for part in parts]


def missing_shards(manifest: Manifest, found: Sequence[Part], named: PartsLike) -> list[str]:
    """The shards of a manifest that are not there, though they have places that folders, patterns or lists name.

    A list of files stands for its folder: most come from a glob. A brace range, and one file, stand for themselves.

    Args:
        found: the parts that are there.
        named: what the user named.
    """
    numbers = numbers_in(manifest, found)
    known = set(numbers)
    rest = [part for number, part in enumerate(manifest.parts) if number not in known]
    if not rest:
        return []
    # Shards may lie elsewhere than when they were indexed.
    moved = {
        _folder(manifest.parts[number]): _folder(part)
        for part, number in zip(found, numbers, strict=True)
        if number is not None
    }
    tests = list(_tests(named))
    gone = []
    for part in rest:
        place = _place(Part(f"{moved.get(_folder(part), _folder(part))}/{part.name}"))
        if any(test(place) for test in tests) and (is_url(place) or not os.path.exists(place)):
            gone.append(part.name)
    return gone


def missing_error(where: str, manifest: Manifest, gone: Sequence[str], remedy: str = "") -> DataError:
    """For shards that the manifest at this place lists and that are not there."""
    return DataError(
        f"{len(gone)} of the {len(manifest.parts)} shards that {where} lists are missing: {few(gone)}. Copy them "
        f"again, or run `pipegraph index` if they are not to be read any more{remedy}"
    )


def refuse_missing(found: Sequence[Part], named: PartsLike) -> None:
    """Raises DataError if the manifest beside local shards lists some that are missing."""
    try:
        beside = load_beside(found)
    except DataError:
        return  # the shards themselves are read
    if beside is not None and (gone := missing_shards(beside[1], found, named)):
        raise missing_error(repr(beside[0]), beside[1], gone)


def few(names: Sequence[str]) -> str:
    """Some of many names, for messages."""
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _tests(named: PartsLike) -> Iterator[Callable[[str], bool]]:
    """For each name, whether it would have named the part at a place."""
    listed = not isinstance(named, str | os.PathLike)
    names: Iterable[str | os.PathLike[str] | Part] = named if listed else [named]  # type: ignore[assignment,list-item]
    folders, patterns = set[str](), set[str]()
    for each in names:
        if isinstance(each, Part):
            continue
        name = os.fspath(each)
        path = name if is_url(name) else os.path.abspath(local_path(name))
        if name.endswith("/") or (not is_url(name) and os.path.isdir(path)):
            folders.add(path.rstrip("/"))
        elif has_magic(name) and not os.path.isfile(path):
            patterns.update(expand_braces(path))
        elif listed and "{" not in name and not is_url(name):
            folders.add(os.path.dirname(path))
    if folders:
        yield lambda place: place.rpartition("/")[0] in folders
    for pattern in patterns:
        yield partial(_matches, re.compile(glob_regex(pattern)))


def _matches(pattern: re.Pattern[str], place: str) -> bool:
    return pattern.fullmatch(place) is not None


def _folder(part: Part) -> str:
    return part.uri.rpartition("/")[0]


def _place(part: Part) -> str:
    """The same for a file however it is named."""
    return os.path.abspath(part.uri) if part.is_local else part.uri
