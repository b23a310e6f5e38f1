"""Which parts of a batch have one row per sample: one rule, for everything that takes a batch apart.

What a batch is made of is known when it is made; what its types do not show is noted in ``Chunk.layout`` then, and
travels with it (:func:`noted`). Below, types decide, and never a length (:func:`resolved`):

* a tensor or an array has a row per sample (one without dimensions belongs to the whole batch);
* a list has an entry per sample, except at the top where it holds tensors: ``[x, y]`` are columns;
* dicts, tuples, named tuples and dataclasses are looked into;
* anything else, and what is wrapped in :class:`Whole`, belongs to the whole batch.

A note holds for as long as a function of the user's leaves something of the same kind in its place. Lengths are only
checked: a part with another number of rows than the batch has samples is an error. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from pipegraph.errors import DataError
from pipegraph.tree import is_dataclass_value, is_namedtuple, named, rebuilt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Whole(Generic[T]):
    """Belongs to the whole batch: ``Whole(class_weights)`` is never cut, all samples and all devices get it."""

    value: T


@dataclass(frozen=True)
class Rows:
    """A note: this list or tuple has an entry per sample, as long as it is of this kind and holds entries of these."""

    kind: type[list[Any]] | type[tuple[Any, ...]]
    entries: frozenset[type]

    def fits(self, data: Any) -> bool:
        """Whether it still holds of what is there now."""
        return isinstance(data, self.kind) and self.entries.issuperset([type(entry) for entry in data])


WHOLE = "whole"
"""A note: this belongs to the whole batch."""
AS_AT_THE_TOP = "top"
"""A note: types decide here as they do at the top."""

Note = Rows | str | Mapping[Any, Any] | tuple[Any, ...] | None
"""Of a part: what is known of it, or of what it contains (by name, or of a list or tuple by place)."""
Parts = bool | dict[Any, Any]
"""Of a part: whether it has a row per sample, or the same of each thing in it, by name or place."""


# -- when a batch is made ----------------------------------------------------------------------------


def noted(batch: Any, samples: Sequence[Any], transposed: bool = False) -> Note:
    """What is known of a batch made of these samples, beyond what its types show.

    A list or tuple of the samples' own values, one after the other, is rows (``collate=tuple``,
    ``tuple(zip(*samples))``), and so is a list at the top of entries of the samples' types.

    Args:
        transposed: lists of the samples were made lists of columns, as ``torch.utils.data.default_collate`` does.
    """
    return _note(batch, samples, transposed, True)


def _note(batch: Any, values: Sequence[Any], transposed: bool, top: bool) -> Note:
    if isinstance(batch, torch.Tensor | np.ndarray) or not values:
        return None
    if isinstance(batch, list | tuple) and not is_namedtuple(batch):
        if len(batch) == len(values) and all(map(is_, batch, values)):
            return Rows(type(batch), frozenset(map(type, values)))
        kept = Rows(list, frozenset(map(type, values)))
        if isinstance(values[0], list | tuple) and len(values[0]) == len(batch):
            below = tuple([_note(part, _at(values, i), transposed, False) for i, part in enumerate(batch)])
            if transposed or all(below) or (any(below) and not kept.fits(batch)):
                return below
        return kept if top and kept.fits(batch) else None
    found = {}
    for name, part in (named(batch) or {}).items():
        note = _note(part, _at(values, name), transposed, False)
        if note is not None:
            found[name] = note
    return found or None


def _at(values: Sequence[Any], name: Any) -> list[Any]:
    """What all samples have in one place; nothing where one of them has no such place."""
    try:
        if isinstance(values[0], Mapping | list | tuple) and not is_namedtuple(values[0]):
            return [value[name] for value in values]
        return [(named(value) or {})[name] for value in values]
    except (LookupError, TypeError):
        return []


# -- when it is taken apart --------------------------------------------------------------------------


def resolved(
    batch: Any,
    note: Note,
    count: int | None,
    opaque: Callable[[Any], bool] = lambda part: False,
    field: str = "",
    top: bool = True,
) -> Parts:
    """Which parts of a batch have a row per sample: a tree of the batch's shape.

    Args:
        note: the chunk's ``layout``.
        count: samples in it; None leaves the lengths unchecked.
        opaque: parts that are not looked into and have no rows.
        field: where this is, for messages.
        top: whether this is the batch itself.
    """
    top = top or note == AS_AT_THE_TOP
    if note == WHOLE or isinstance(batch, Whole) or opaque(batch):
        return False
    rows: bool | None = None  # looked into
    if isinstance(batch, torch.Tensor | np.ndarray):
        rows = batch.ndim > 0
    elif isinstance(batch, list | tuple) and not is_namedtuple(batch):
        if isinstance(note, Rows) and note.fits(batch):
            rows = True
        elif isinstance(batch, list) and not (isinstance(note, tuple) and len(note) == len(batch)):
            rows = None if top and any(isinstance(x, torch.Tensor | np.ndarray) for x in batch) else True
    elif not (isinstance(batch, Mapping) or is_namedtuple(batch) or is_dataclass_value(batch)):
        return False
    if rows is None:
        known = _known(note)
        return {
            name: resolved(
                part, known.get(name), count, opaque, f"{field}.{name}" if field else str(name), False
            )
            for name, part in (named(batch) or {}).items()
        }
    if rows and count is not None and len(batch) != count:
        where = f"field {field!r}" if field else "the batch"
        raise DataError(
            f"{where}: {len(batch)} rows in a batch of {count} samples: tensors, arrays and lists in a batch have a "
            "row per sample; wrap what belongs to the whole batch in pg.replicas.Whole(...), return columns in a dict "
            "or a tuple, and make more or fewer samples with FlatMap, or before Batch"
        )
    return rows


def _known(note: Note) -> Mapping[Any, Any]:
    if isinstance(note, tuple):
        return dict(enumerate(note))
    return note if isinstance(note, Mapping) else {}


def map_rows(
    function: Callable[[Any], Any], batch: Any, parts: Parts, whole: Callable[[Any], Any] = lambda part: part
) -> Any:
    """The batch with ``function(part)`` for each part that has rows, and ``whole(part)`` for those that have none."""
    if parts is True:
        return function(batch)
    if parts is False:
        return whole(batch)
    found = named(batch) or {}
    return rebuilt(batch, [map_rows(function, found[name], below, whole) for name, below in parts.items()])


def take_row(batch: Any, parts: Parts, index: int) -> Any:
    """Sample ``index`` of a batch: the same tree without the sample dimension."""
    return map_rows(lambda part: part[index], batch, parts, _opened)


def _opened(part: Any) -> Any:
    return part.value if isinstance(part, Whole) else part


def select_rows(batch: Any, kept: Sequence[int], count: int, note: Note) -> Any:
    """The batch of ``count`` samples with only the samples ``kept``."""
    chosen = list(kept)

    def select(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return type(part)([part[i] for i in chosen])
        return part[chosen]

    return map_rows(select, batch, resolved(batch, note, count))
