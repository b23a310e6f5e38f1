"""A table beside a folder of files: which files are samples, and their further fields."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from typing import Any

from pipegraph.errors import DataError, shown
from pipegraph.storage.folders import FileList

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
