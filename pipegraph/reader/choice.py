"""The columns that ``Load`` reads, and what fills their nulls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipegraph.errors import GraphError, shown

if TYPE_CHECKING:
    from pipegraph.storage import Part
    from pipegraph.storage.formats import Format


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
    """Columns of the shards that have columns, all of them by default, and what fills their nulls."""

    columns: tuple[str, ...] | None = None
    fill: Mapping[str, Any] | None = None

    def config(self) -> dict[str, Any]:
        """For the graph's digest; nothing where all is read."""
        chosen: dict[str, Any] = {} if self.columns is None else {"columns": list(self.columns)}
        return {**chosen, "fill": repr(dict(self.fill))} if self.fill else chosen

    def form(self, part: Part) -> Format:
        """A part's format, reading what was chosen."""
        from pipegraph.storage.formats import format_of

        form = format_of(part)
        return form if self.columns is None and not self.fill else form.choosing(self.columns, self.fill)
