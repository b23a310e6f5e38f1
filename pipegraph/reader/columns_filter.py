"""The columns and rows that ``Load`` reads; whether all parts have the same fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipegraph import concurrency
from pipegraph.errors import DataError, GraphError, ShardError, shown

if TYPE_CHECKING:
    from pipegraph.storage import Part, ShardFile
    from pipegraph.storage.formats import Format
    from pipegraph.storage.formats.folder_columns import FolderColumns
    from pipegraph.storage.stores import StoreClient


def chosen_columns(columns: Any, operator: str) -> tuple[str, ...] | None:
    """The names of ``columns=``; None where it is."""
    if columns is None:
        return None
    if isinstance(columns, str):
        raise GraphError(
            f"{operator}: columns must be a list of names, got {shown(columns)}: write columns=[{columns!r}]"
        )
    # A set of texts has another order in each process, and the order is a part of states.
    given = sorted(columns) if isinstance(columns, Set) else columns
    names = tuple(given) if isinstance(given, Iterable) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise GraphError(f"{operator}: columns must be a list of at least one name, got {shown(columns)}")
    return names


@dataclass(frozen=True)
class Choice:
    """Columns and rows of the shards that have columns, all of them by default, and what fills their nulls."""

    columns: tuple[str, ...] | None = None
    filter: Sequence[Any] | None = None
    fill: Mapping[str, Any] | None = None
    folders: FolderColumns | None = None

    def __bool__(self) -> bool:
        return self.columns is not None or self.filter is not None or bool(self.fill)

    def config(self) -> dict[str, Any]:
        """For the graph's digest; nothing where all is read."""
        chosen = {"columns": self.columns, "filter": self.filter, "fill": self.fill or None}
        return {name: _json(value) for name, value in chosen.items() if value is not None}

    def of(self, parts: Iterable[Part]) -> Choice:
        """The same of these parts, with the columns of the folders that they lie in."""
        from pipegraph.storage.formats.folder_columns import FolderColumns

        return replace(self, folders=FolderColumns(parts))

    def form(self, part: Part) -> Format:
        """A part's format, reading what was chosen."""
        from pipegraph.storage.formats import format_of

        form = format_of(part)
        if self:
            form = form.choosing(self.columns, self.filter, self.fill)
        return form if self.folders is None else form.beside(self.folders.of(part))


class SameFields:
    """Says where the fields of one part differ from those of the first. Thread-safe."""

    def __init__(self, parts: Sequence[Part], choice: Choice, store: StoreClient | None) -> None:
        self._parts, self._choice, self._store = parts, choice, store
        self._lock = concurrency.Lock()
        self._first: tuple[Part, Mapping[str, str]] | None = None
        self._alike: set[int] = set()

    def check(self, number: int, file: ShardFile) -> None:
        """Compare a part that is open; each is looked at once."""
        with self._lock:
            if number in self._alike:
                return
            first = self._first
        fields = self._choice.form(self._parts[number]).fields(file)
        if fields is not None:
            if first is None:
                first = self._find_first(number, fields)
            differences = _differences(fields, first[1])
            if differences:
                raise ShardError(
                    f"{file.name}: its fields differ from those of {first[0].name!r}: {differences}. Write the parts "
                    "alike, name those that are alike in Load(columns=...), or give them a ShardSelect of their own"
                )
        with self._lock:
            self._alike.add(number)
            self._first = first

    def _find_first(self, number: int, fields: Mapping[str, str]) -> tuple[Part, Mapping[str, str]]:
        from pipegraph.storage.object_file import open_part

        # Not whichever is opened first: then timing would decide which parts are the odd ones.
        for part in self._parts[:number]:
            try:
                with open_part(part, self._store) as file:
                    found = self._choice.form(part).fields(file)
            except (DataError, OSError):
                continue  # what is wrong with it is said where it is read
            if found is not None:
                return part, found
        return self._parts[number], fields


def _json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return list(map(_json, value))
    return value if value is None or isinstance(value, str | int | float) else repr(value)


def _differences(found: Mapping[str, str], first: Mapping[str, str]) -> str:
    shown = [f"{name!r} is missing" for name in first if name not in found]
    shown += [f"{name!r} is new" for name in found if name not in first]
    shown += [
        f"{name!r} is {found[name]}, not {first[name]}"
        for name in first
        if name in found and found[name] != first[name]
    ]
    return ", ".join(shown[:4]) + (" and more" if len(shown) > 4 else "")
