"""Columns that lie in the names of folders, ``year=2024/label=3/part-0.parquet``, as Hive and pyarrow write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import unquote

from pipegraph.storage.parts import Part

_FOLDER: Final = re.compile(r"(?:^|(?<=/))([^/=]+)=([^/]*)(?=/)")
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"

FolderValues = Mapping[str, tuple[str, int | str | None]]
"""By column, the name of its Arrow type and its value, the same for all rows of a part."""


class FolderColumns:
    """The columns of some parts, typed as pyarrow does: int32 where all values of a column are, else text; null where a
    part has none.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._kinds: dict[str, str] = {}
        for part in parts:
            for name, text in _folders(part).items():
                fits = text is None or _is_int32(text)
                self._kinds[name] = self._kinds.get(name, "int32") if fits else "string"

    def of(self, part: Part) -> FolderValues:
        """The values of one of the parts."""
        found = _folders(part) if self._kinds else {}
        texts = {name: (kind, found.get(name)) for name, kind in self._kinds.items()}
        return {
            name: (kind, int(text) if text is not None and kind == "int32" else text)
            for name, (kind, text) in texts.items()
        }


def _folders(part: Part) -> dict[str, str | None]:
    texts = {unquote(name): unquote(value) for name, value in _FOLDER.findall(part.uri)}
    return {name: None if text == _NULL else text for name, text in texts.items()}


def _is_int32(text: str) -> bool:
    return re.fullmatch("-?[0-9]{1,20}", text) is not None and -(1 << 31) <= int(text) < 1 << 31
