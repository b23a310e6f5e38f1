"""The files of a folder as samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

from pipegraph.errors import GraphError, shown
from pipegraph.foreign_arguments import names_ours
from pipegraph.integers import flag
from pipegraph.once import Once
from pipegraph.operators.ordered import OrderedSource, digest_of, order_of
from pipegraph.order import Order, StridedOrder
from pipegraph.paths import path_of
from pipegraph.storage.folders import Classes, FileList, list_files

if TYPE_CHECKING:
    from pipegraph.storage.folders import Table


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
        table: a CSV file with a header, a table of pyarrow, pandas or polars, or rows as mappings: only the files
            that it names are samples, and its other columns are their fields. In a CSV file columns of whole numbers
            become int, of other numbers float.
        on: the table's column with the path of a file below `root`, with or without its extension.

    Raises:
        GraphError: ``classes`` or ``pattern`` is something else, ``table`` comes without ``on``, or both ``order`` and
            ``shuffle`` are given.
        DataError: at the first pass or ``len``: there is no such folder, no file in it, a file outside class folders,
            a class folder without files, or a row of the table without a file.
    """

    name = "listfiles"

    @names_ours
    def __init__(
        self,
        root: str | os.PathLike[str],
        pattern: str | Sequence[str] | None = None,
        classes: Classes = "auto",
        order: Order | None = None,
        shuffle: bool | None = None,
        allow_empty: bool = False,
        table: Table | None = None,
        on: str | None = None,
    ) -> None:
        super().__init__(order_of(order, shuffle, StridedOrder(shuffle=False), "ListFiles"))
        named = isinstance(classes, list | tuple) and len(set(classes)) == len(classes) > 0
        if not named and not (isinstance(classes, str | bool) and classes in ("auto", True, False)):
            raise GraphError(
                f'ListFiles: classes must be "auto", True, False or a list of names, got {shown(classes)}'
            )
        if (table is None) != (on is None):
            raise GraphError(
                'ListFiles: table and on go together: ListFiles(root, table="labels.csv", on="file")'
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
        if table is not None and classes not in ("auto", False):
            raise GraphError("ListFiles: give table or classes, not both: a table's columns are the labels")
        self._table = table, on
        wanted = classes if table is None else False
        self._listed = partial(
            list_files, self.root, pattern, wanted, flag(allow_empty, "ListFiles: allow_empty")
        )
        self._files = Once(self._list)

    def _list(self) -> FileList:
        files, (table, on) = self._listed(), self._table
        if table is None or on is None:
            return files
        from pipegraph.storage.folders import with_table

        return with_table(files, table, on)

    def files(self) -> FileList:
        """The files, in the order of their paths, or of the table's rows."""
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
        data: dict[str, Any] = {
            "files": len(files),
            "names": digest_of(files.paths),
            "classes": list(files.classes),
        }
        if files.columns:
            data["columns"] = {name: digest_of(map(repr, values)) for name, values in files.columns.items()}
        return {**data, "pattern": self.pattern, **self.order.config()}

    def sees(self) -> str:
        return f"{len(self.files())} files, digest {digest_of(self.files().paths)}"

    def origin(self) -> str:
        files = self.files()
        return f"{len(files)} files, whose names have the digest {digest_of(files.paths)}"
