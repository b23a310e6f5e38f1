"""Iterates over user objects that several loaders may share: one pass at a time begins, and resumes from a state."""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from pipegraph import concurrency
from pipegraph.parameters import is_iterator, iterator_of, without_rewind


class Turn:
    """A lock for what belongs to the user and is thus shared by all copies; a copied or pickled graph has its own."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._latest: weakref.ref[DrawnItems] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Turn, ()

    def begin(self, items: Any, epoch: int, state: Any = None) -> DrawnItems:
        """Begin to read ``items`` in an epoch, from ``state`` if there is one; ``set_epoch`` is called first where it
        exists.

        Another loader may set another epoch, or load another state, as soon as the first item is there, and no sooner.
        """
        resumable = _is_resumable(items) and not is_iterator(items)
        if not resumable and not hasattr(items, "set_epoch"):
            return DrawnItems.of_iterator(iterator_of(items), state)
        with self._lock:
            if hasattr(items, "set_epoch"):
                items.set_epoch(epoch)
            if resumable and state is not None:
                items.load_state_dict(copy.deepcopy(state))
            begun = iterator_of(items)
            if not resumable and _is_resumable(
                begun
            ):  # it may resume from a state, and then must not have begun
                return DrawnItems.of_iterator(begun, state)
            begun = without_rewind(begun)
            first = list(islice(begun, 1))
            if not resumable:
                return DrawnItems(chain(first, begun))
            if state is not None and _is_streaming(items):
                # Later passes start from their beginning; else each over its epoch would go back to the loaded state.
                items.load_state_dict(None)
            drawing = DrawnItems(chain(first, begun), items, self)
            self._latest = weakref.ref(drawing)
        return drawing

    def is_latest(self, drawing: DrawnItems) -> bool:
        """Whether no other loader has begun to read the same object since."""
        latest = self._latest
        return latest is not None and latest() is drawing


class DrawnItems:
    """What is read of an iterable in one pass: ``items`` are those that are left."""

    def __init__(self, items: Iterator[Any], resumable: Any = None, turn: Turn | None = None) -> None:
        self.items = without_rewind(items)
        self._resumable: Any = items if resumable is None and _is_resumable(items) else resumable
        self._turn = turn

    @staticmethod
    def of_iterator(items: Iterator[Any], state: Any) -> DrawnItems:
        """What an iterator has left, from ``state`` if there is one."""
        if state is not None:
            items.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
        return DrawnItems(items)

    def state(self) -> Any:
        """From which another pass can resume where this one stands; None where there is none.

        Of an iterable there is none once another loader has begun to read it: it has one state.
        """
        if self._resumable is None or (self._turn is not None and not self._turn.is_latest(self)):
            return None
        return self._resumable.state_dict()


def _is_resumable(items: Any) -> bool:
    """Whether it has ``state_dict()`` and ``load_state_dict(state)``; some have methods so named that ask for more."""
    try:
        inspect.signature(items.state_dict).bind()
        inspect.signature(items.load_state_dict).bind(None)
    except (AttributeError, TypeError, ValueError):
        return False
    return not _is_streaming(items) or _state_is_exact(items)


def _is_streaming(items: Any) -> bool:
    """Whether this is one of Hugging Face's streaming datasets; ``datasets`` is not imported for it."""
    module = sys.modules.get("datasets")
    kind = getattr(module, "IterableDataset", None)
    return kind is not None and isinstance(items, kind)


def _state_is_exact(items: Any) -> bool:
    """Whether its state holds all that decides what comes next.

    The rows in a shuffle buffer are not in it, nor, where rows are Arrow tables, those between two batches of a map:
    after a resume from such a state they would be lost.
    """
    formatting = getattr(items, "_formatting", None)
    if formatting is not None and formatting.is_table:
        return False
    return not any(
        type(step).__name__ == "BufferShuffledExamplesIterable" for step in _steps(items._ex_iterable)
    )


def _steps(step: Any) -> Iterator[Any]:
    yield step
    below = getattr(step, "ex_iterables", None) or (getattr(step, "ex_iterable", None),)
    for each in below:
        if each is not None:
            yield from _steps(each)
