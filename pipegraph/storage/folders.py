"""Folders of files, one sample each; class folders give the labels."""

from __future__ import annotations

import csv
import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipegraph.errors import DataError, shown
from pipegraph.paths import broken_link, like_a_file, path_of, unread_folder

if TYPE_CHECKING:
    import numpy.typing as npt

BESIDES = ("readme*", "license*", "licence*", "thumbs.db", "desktop.ini", "md5sum*", "sha256sum*")
"""Files that people and systems leave beside the samples; where no pattern is given they are none."""


@dataclass(frozen=True, slots=True)
class FileList:
    """The files of a folder, sorted by path.

    ``paths`` are relative to ``root``, with ``/``, and serve as keys; ``labels``, int64 (files,), number ``classes``;
    ``columns`` are further fields, a value for each file.
    """

    root: str
    paths: tuple[str, ...]
    classes: tuple[str, ...] = ()
    labels: npt.NDArray[np.int64] | None = field(default=None, compare=False)
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sample ``{"key", "path"}``, with classes also ``"label"`` (int), and the columns."""
        path = self.paths[index]
        sample: dict[str, Any] = {"key": path, "path": os.path.join(self.root, path)}
        if self.labels is not None:
            sample["label"] = int(self.labels[index])
        for name, values in self.columns.items():
            sample[name] = values[index]
        return sample


Classes = Literal["auto", True, False] | Sequence[str]


def list_files(
    root: str | os.PathLike[str],
    pattern: str | Sequence[str] | None = None,
    classes: Classes = "auto",
    allow_empty: bool = False,
) -> FileList:
    """The files below `root`, hidden ones left out; links to folders are followed, but not back to a folder above.
    Arguments as of ``ListFiles``.

    With ``classes="auto"`` the first folder of a path is the file's class if at least two such folders have files. All
    folders in `root` are numbered in sorted order, as torchvision's ImageFolder does, whatever is in them.

    Raises:
        DataError: no such folder, no file in it, a folder that is a broken link or cannot be searched, files outside
            class folders, or a class folder without files.
    """
    root = path_of(root, "ListFiles: root")
    if not os.path.isdir(root):
        raise DataError(f"folder {root!r}: there is no such folder")
    patterns = None if pattern is None else (pattern,) if isinstance(pattern, str) else tuple(pattern)
    paths = tuple(sorted(_walk(root, patterns)))
    matching = f" matches {pattern!r}" if patterns else ""
    if not paths:
        raise DataError(f"folder {root!r}: no file in it{matching}")
    filled = {path.partition("/")[0] for path in paths if "/" in path}
    if classes is False or (classes == "auto" and len(filled) < 2):
        return FileList(root, paths)
    loose = next((path for path in paths if "/" not in path), None)
    if loose is not None:
        raise DataError(
            f"folder {root!r}: {loose!r} is in no class folder. Move it away, leave it out with "
            "pattern='*/*', or give classes=False: samples without labels"
        )
    there = {each.name for each in os.scandir(root) if each.is_dir() and not each.name.startswith(".")}
    names = tuple(sorted(there)) if isinstance(classes, str | bool) else tuple(classes)
    strange = sorted(there - set(names))
    if strange:
        raise DataError(f"folder {root!r}: classes= does not name the folder {strange[0]!r}")
    empty = [name for name in names if name not in filled]
    if empty and not allow_empty:
        raise DataError(
            f"folder {root!r}: no file in the class folder {empty[0]!r}{matching}. If that is meant, give "
            "allow_empty=True to ListFiles: the folder keeps its number; pack the samples of such a graph"
        )
    number = {name: index for index, name in enumerate(names)}
    labels = np.fromiter((number[path.partition("/")[0]] for path in paths), np.int64, len(paths))
    return FileList(root, paths, names, labels)


def _wanted(path: str, patterns: tuple[str, ...] | None) -> bool:
    path = path.lower()
    name = path.rpartition("/")[2]
    if patterns is None:
        return not is_beside(name)
    for pattern in map(str.lower, patterns):
        # "**/" may also stand for no folder at all.
        rest = pattern.removeprefix("**/")
        if "/" not in rest:
            if fnmatch.fnmatchcase(name, rest):
                return True
        elif fnmatch.fnmatchcase(path, rest) or (rest != pattern and fnmatch.fnmatchcase(path, f"*/{rest}")):
            return True
    return False


def _refuse_broken_folder(folder: str, name: str) -> None:
    """Raises DataError for a broken link that may stand for a folder. One to a file is listed, and fails where it is
    read.
    """
    if is_beside(name.lower()):
        return
    path = os.path.join(folder, name)
    target = broken_link(path)
    if target is not None:
        raise DataError(
            f"{path!r} is a link to {target!r}, which is not there or cannot be reached: a folder's files would be "
            "missing; mend the link, or remove it"
        )


def _refuse_unread(error: OSError) -> None:
    """Raises DataError for a folder that `os.walk` cannot list and would pass over."""
    why = unread_folder(error.filename)
    if why is not None:
        raise DataError(
            f"folder {error.filename!r} cannot be searched ({why}): its files would be missing; give this user the "
            "permission, or move the folder away"
        ) from error


def is_beside(name: str) -> bool:
    """Whether a name in lower case is one of `BESIDES`."""
    return any(fnmatch.fnmatchcase(name, besides) for besides in BESIDES)


def _walk(root: str, patterns: tuple[str, ...] | None) -> Iterator[str]:
    above: dict[str, tuple[tuple[int, int], ...]] = {}  # of folders still to come: those on the way to them
    for folder, subfolders, files in os.walk(root, onerror=_refuse_unread, followlinks=True):
        status = os.stat(folder)
        way = above.pop(folder, ())
        # A link back to a folder above would walk for ever. One that two links lead to counts twice, as in torchvision:
        # each may be a class, and a class must not vanish.
        if (here := (status.st_dev, status.st_ino)) in way:
            subfolders.clear()
            continue
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        above.update((os.path.join(folder, name), (*way, here)) for name in subfolders)
        prefix = os.path.relpath(folder, root).replace(os.sep, "/")
        if not all(map(like_a_file, files)):
            with os.scandir(folder) as entries:  # says what is a link without another request
                for name in [
                    each.name for each in entries if not like_a_file(each.name) and each.is_symlink()
                ]:
                    _refuse_broken_folder(folder, name)
        for name in files:
            path = name if prefix == "." else f"{prefix}/{name}"
            if not name.startswith(".") and _wanted(path, patterns):
                yield path


Table = Any
"""A CSV file with a header, a table of pyarrow, pandas or polars, or rows as mappings."""


def with_table(files: FileList, table: Table, on: str) -> FileList:
    """The files that a table names, in the order of its rows, with its other columns as fields.

    Args:
        on: the column that names the file: its path below the folder, or that without its extension.

    Raises:
        DataError: there is no such column, or a row names no file, several, or one that another row named.
    """
    is_csv = isinstance(table, str | os.PathLike)
    rows = _read(table) if is_csv else _rows(table)
    if not rows or on not in rows[0]:
        found = ", ".join(map(repr, rows[0])) if rows else "no rows"
        raise DataError(f"ListFiles: the table has no column on={on!r}; there are {found}")
    by_name: dict[str, list[int]] = {}
    for index, path in enumerate(files.paths):
        for name in {path, os.path.splitext(path)[0]}:
            by_name.setdefault(name, []).append(index)
    places: dict[int, None] = {}
    for number, row in enumerate(rows, 1):
        name = str(row[on]).removeprefix("./")
        here = by_name.get(name, [])
        if len(here) != 1 or here[0] in places:
            why = "no such file" if not here else "several such files" if len(here) > 1 else "named twice"
            raise DataError(
                f"ListFiles: row {number} of the table names {name!r}, folder {files.root!r}: {why}"
            )
        places[here[0]] = None
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != on}
    if is_csv:
        columns = {name: _typed(values) for name, values in columns.items()}
    return FileList(files.root, tuple(files.paths[place] for place in places), columns=columns)


def _read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            rows = list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"ListFiles: table={shown(path)} is no CSV file in UTF-8: {error}") from error
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise DataError(
                f"ListFiles: table={shown(path)}: row {number} has another number of cells than the header"
            )
    return rows


def _rows(table: Any) -> list[Mapping[str, Any]]:
    for each in ("to_dicts", "to_pylist"):  # of polars, of pyarrow
        if hasattr(table, each):
            return list(getattr(table, each)())
    return list(table.to_dict("records") if hasattr(table, "iloc") else table)


def _typed(values: list[str]) -> list[Any]:
    """Texts as numbers where all of them are; int() takes 1_000 too."""
    for kind in (int, float) if not any("_" in value for value in values) else ():
        try:
            return [kind(value) for value in values]
        except ValueError:
            continue
    return values
