"""The manifest that lies beside shards, and the shards that a manifest lists and that are not there."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence

from pipegraph.errors import DataError, StoreError

from .manifest import Manifest
from .parts import Part, PartsLike, expand_braces, has_magic, is_url
from .side_files import MANIFEST
from .stores import StoreClient
from .urls import glob_regex


def manifest_beside(parts: Sequence[Part]) -> str | None:
    """Where the manifest of these parts is written and looked for: in their folder, if that is one."""
    folders = {_folder(part) for part in parts}
    if len(folders) != 1:
        return None
    folder = folders.pop()
    return os.path.join(folder, MANIFEST) if parts[0].is_local else f"{folder}/{MANIFEST}"


def load_beside(parts: Sequence[Part], store: StoreClient | None = None) -> tuple[str, Manifest] | None:
    """The manifest that lies beside these parts and lists some of them, and its place."""
    path = manifest_beside(parts)
    if path is None:
        return None
    try:
        manifest = Manifest.load(path, store)
    except FileNotFoundError:
        return None
    except (StoreError, DataError) as error:
        if getattr(error, "errno", None) == errno.ENOENT:  # some stores forbid what is not there
            return None
        raise DataError(f"{path!r} is not used: {error}") from error
    return (path, manifest) if any(n is not None for n in numbers_in(manifest.parts, parts)) else None


def numbers_in(listed: Sequence[Part], parts: Sequence[Part]) -> list[int | None]:
    """The numbers of these parts in the list of a manifest: by place, else by name."""
    by_place = {_place(part): number for number, part in enumerate(listed)}
    by_name = {part.name: number for number, part in enumerate(listed)}
    if len(by_name) < len(listed):
        by_name = {}  # names alone do not distinguish them
    return [by_place.get(_place(part), by_name.get(part.name)) for part in parts]


def missing_shards(listed: Sequence[Part], found: Sequence[Part], named: PartsLike) -> list[str]:
    """The listed shards that are neither among those found nor, though not named, there.

    Of a store's objects only those are looked for that a folder or a pattern names.
    """
    numbers = numbers_in(listed, found)
    known = set(numbers)
    # Shards may lie elsewhere than when they were indexed.
    moved = {
        _folder(listed[number]): _folder(part)
        for part, number in zip(found, numbers, strict=True)
        if number is not None
    }
    names = [named] if isinstance(named, str | os.PathLike) else named
    texts = [os.fspath(each) for each in names if not isinstance(each, Part)]
    patterns = [
        re.compile(glob_regex(f"{each}*" if each.endswith("/") else each))
        for text in texts
        if is_url(text)
        for each in expand_braces(text)
        if each.endswith("/") or has_magic(each)
    ]
    gone = []
    for number, part in enumerate(listed):
        if number in known:
            continue
        place = _place(Part(f"{moved.get(_folder(part), _folder(part))}/{part.name}"))
        if any(each.fullmatch(place) for each in patterns) if is_url(place) else not os.path.exists(place):
            gone.append(part.name)
    return gone


def missing_error(where: str, listed: int, gone: Sequence[str], remedy: str = "") -> DataError:
    """For shards that are not there, of all that the manifest at this place lists."""
    return DataError(
        f"{len(gone)} of the {listed} shards that {where} lists are missing: {few(gone)}. Copy them "
        f"again, or run `pipegraph index` if they are not to be read any more{remedy}"
    )


def few(names: Sequence[str]) -> str:
    """Some of many names, for messages."""
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _folder(part: Part) -> str:
    return part.uri.rpartition("/")[0]


def _place(part: Part) -> str:
    """The same for a file however it is named."""
    return os.path.abspath(part.uri) if part.is_local else part.uri
