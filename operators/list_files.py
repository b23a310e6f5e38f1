"""The files of a folder as samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, final

from pipegraph.errors import GraphError, shown
from pipegraph.integers import flag
from pipegraph.operators.ordered import OrderedSource, digest_of, order_of
from pipegraph.order import Order, StridedOrder
from pipegraph.paths import path_of
from pipegraph.stopping import Once
from pipegraph.storage.folders import Classes, FileList, list_files


@final
class ListFiles(OrderedSource):
    """Files of a folder as samples ``{"key", "path"}``; with class folders ``"label"`` too.

    Args:
        root: the folder. It is listed at the first pass (or ``len``), with its subfolders and without hidden files.
            Links to folders are followed, except back to a folder above.
        pattern: a glob on file names, such as ``"*.jpg"``. If it contains a ``/``, it is matched with the path below
            `root` (``"train/*.jpg"``). You can give several: ``("*.jpg", "*.png")``. Case is ignored. By default all
            files are taken except those that are usually not samples: READMEs, licences, checksums, ``Thumbs.db``.
        classes: whether the first folder of a path is the file's class, or the classes' names in the order of their
            labels. With ``"auto"`` it is if at least two folders have files. The folders are numbered in sorted order,
            whatever is in them; ``.classes`` has their names.
        order: decides which file is at which position.
        shuffle: whether the files are shuffled in each epoch; by default they are not.
        allow_empty: whether a class folder may have no files.

    Raises:
        GraphError: ``classes`` or ``pattern`` is something else, or both ``order`` and ``shuffle`` are given.
        DataError: at the first pass or ``len``: there is no such folder, no file in it, a file outside class folders,
            or a class folder without files.
    """

    name = "listfiles"

    def __init__(
        self,
        root: str | os.PathLike[str],
        pattern: str | Sequence[str] | None = None,
        classes: Classes = "auto",
        order: Order | None = None,
        shuffle: bool | None = None,
        allow_empty: bool = False,
    ) -> None:
        super().__init__(order_of(order, shuffle, StridedOrder(shuffle=False), "ListFiles"))
        named = isinstance(classes, list | tuple) and len(set(classes)) == len(classes) > 0
        if not named and not (isinstance(classes, str | bool) and classes in ("auto", True, False)):
            raise GraphError(
                f'ListFiles: classes must be "auto", True, False or a list of names, got {shown(classes)}'
            )
        texts = [pattern] if isinstance(pattern, str) else pattern
        if texts is not None and not (
            isinstance(texts, list | tuple) and texts and all(isinstance(text, str) for text in texts)
        ):
            raise GraphError(
                f"ListFiles: pattern must be a glob such as '*.jpg', or several, got {shown(pattern)}"
            )
        self.root = path_of(root, "ListFiles: root")
        self.pattern = pattern
        empty = flag(allow_empty, "ListFiles: allow_empty")
        self._files = Once(partial(list_files, self.root, pattern, classes, empty))

    def files(self) -> FileList:
        """The files, in the order of their paths."""
        return self._files.get()

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their labels; lists the folder where that was not done."""
        return self.files().classes

    def layout(self) -> int:
        return len(self.files())

    def item(self, index: int) -> Any:
        return self.files()[index]

    def config(self) -> dict[str, Any]:
        files = self.files()
        facts = {"files": len(files), "names": digest_of(files.paths), "classes": list(files.classes)}
        return {**facts, "pattern": self.pattern, **self.order.config()}

    def sees(self) -> str:
        return f"{len(self.files())} files, digest {digest_of(self.files().paths)}"

    def origin(self) -> str:
        files = self.files()
        return f"{len(files)} files, whose names have the digest {digest_of(files.paths)}"
