"""Folders of files, one sample each; class folders give the labels."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipegraph.errors import DataError
from pipegraph.paths import path_of

if TYPE_CHECKING:
    import numpy.typing as npt

BESIDES = ("readme*", "license*", "licence*", "thumbs.db", "desktop.ini", "md5sum*", "sha256sum*")
"""Files that people and systems leave beside the samples; where no pattern is given they are none."""

NOT_OURS = ("lost+found", "System Volume Information")
"""Folders that file systems keep at their root, where only the administrator may look."""


@dataclass(frozen=True, slots=True)
class FileList:
    """The files of a folder, sorted by path.

    ``paths`` are relative to ``root``, with ``/``, and serve as keys; ``labels``, int64 (files,), number ``classes``.
    """

    root: str
    paths: tuple[str, ...]
    classes: tuple[str, ...] = ()
    labels: npt.NDArray[np.int64] | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sample ``{"key", "path"}``, with classes also ``"label"`` (int)."""
        path = self.paths[index]
        sample: dict[str, Any] = {"key": path, "path": os.path.join(self.root, path)}
        if self.labels is not None:
            sample["label"] = int(self.labels[index])
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
        DataError: no such folder, no file in it, a folder that cannot be searched, files outside
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
        return not any(fnmatch.fnmatchcase(name, besides) for besides in BESIDES)
    for pattern in map(str.lower, patterns):
        # "**/" may also stand for no folder at all.
        rest = pattern.removeprefix("**/")
        if "/" not in rest:
            if fnmatch.fnmatchcase(name, rest):
                return True
        elif fnmatch.fnmatchcase(path, rest) or (rest != pattern and fnmatch.fnmatchcase(path, f"*/{rest}")):
            return True
    return False


def _refuse(error: OSError) -> None:
    raise DataError(
        f"folder {error.filename!r} cannot be searched ({error.strerror}): its files would be missing; give this user "
        "the permission, or move the folder away"
    ) from error


def _walk(root: str, patterns: tuple[str, ...] | None) -> Iterator[str]:
    above: dict[str, tuple[tuple[int, int], ...]] = {}  # of folders still to come: those on the way to them
    for folder, subfolders, files in os.walk(root, onerror=_refuse, followlinks=True):
        status = os.stat(folder)
        way = above.pop(folder, ())
        # A link back to a folder above would walk for ever. One that two links lead to counts twice, as in torchvision:
        # each may be a class, and a class must not vanish.
        if (here := (status.st_dev, status.st_ino)) in way:
            subfolders.clear()
            continue
        subfolders[:] = sorted(n for n in subfolders if not n.startswith(".") and n not in NOT_OURS)
        above.update((os.path.join(folder, name), (*way, here)) for name in subfolders)
        prefix = os.path.relpath(folder, root).replace(os.sep, "/")
        for name in files:
            path = name if prefix == "." else f"{prefix}/{name}"
            if not name.startswith(".") and _wanted(path, patterns):
                yield path
