"""FromIterable: the items of any iterable; and how user objects that several loaders may share are iterated: one pass
at a time begins, and resumes from a state."""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from typing import Any, final

import numpy as np

from pipegraph import concurrency
from pipegraph.contracts import Context, History, Source, Traits
from pipegraph.errors import GraphError, PipegraphError, StateError, shown
from pipegraph.global_generators import Draws
from pipegraph.integers import flag
from pipegraph.operators.ordered import POSITIONS_AT_ONCE
from pipegraph.order.left import Left, check_history, left_of
from pipegraph.parameters import (
    UNORDERED,
    function_name,
    is_iterator,
    iterator_of,
    length_of,
    names_taken,
    without_rewind,
)
from pipegraph.tree import copy_containers

_CLAIMS: weakref.WeakKeyDictionary[Any, dict[str, tuple[int, object]]] = weakref.WeakKeyDictionary()
"""The epoch that has read a generator, by generator: a later one would begin behind what that had read ahead."""


@final
class FromIterable(Source):
    """The items of an iterable, which is iterated once per epoch.

    Give a callable to create a new iterable for each epoch; if it has a parameter ``epoch``, it gets the epoch. A plain
    iterator can be read only once, so it is good for one epoch.

    Yield a new array for each item: what waits in a queue is not copied.

    On resume, the iterable is read again from its start, and the items already delivered are skipped. It must therefore
    yield the same items again. If the iterable or its iterator has ``state_dict()`` and ``load_state_dict(state)``, as
    Hugging Face's streaming datasets and torchdata's loaders have, it resumes inside an epoch from its own state
    instead; each epoch calls ``iter`` anew. A Hugging Face dataset with a shuffle buffer is always read again, because
    its state does not include the buffer: put ``Shuffle`` after it instead. If there are fewer items than were
    delivered, a ``StateError`` says so.

    If the iterator blocks for long (a silent socket, a queue), ``close`` and Ctrl-C take 5 s and the thread is left
    behind, because a thread cannot be ended from outside. A worker process is ended within 3 s. A ``Source`` whose
    ``cancel`` ends the wait ends at once.

    Args:
        iterable: the items, or a callable that returns them.
        shard: whether rank r of W takes items r, r+W, r+2W ...; with False every rank takes all items. An iterable
            that gives each rank its own items needs False: otherwise each rank would take a part of its part.

    Raises:
        GraphError: it is neither iterable nor callable, is a set, or was split with
            ``split_dataset_by_node`` and ``shard`` is True.
    """

    name = "fromiterable"

    def __init__(self, iterable: Iterable[Any] | Callable[..., Iterable[Any]], shard: bool = True) -> None:
        if isinstance(iterable, set | frozenset):
            raise GraphError(f"FromIterable: the iterable is {UNORDERED}")
        # Of the type: a class has the __iter__ of its instances and is called to make one.
        self._callable = callable(iterable) and not hasattr(type(iterable), "__iter__")
        if not self._callable and not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
            raise GraphError(
                f"FromIterable: an iterable or a callable that returns one is needed, got {shown(iterable)}"
            )
        self.iterable: Any = iterable
        self.shard = flag(shard, "FromIterable: shard")
        if (
            self.shard and getattr(getattr(iterable, "_distributed", None), "world_size", 1) > 1
        ):  # of Hugging Face
            raise GraphError(
                "FromIterable: the dataset is a rank's part already (split_dataset_by_node), of which each rank would "
                "take a part again: give the whole dataset, or shard=False"
            )
        self._in_memory = type(iterable) in (list, range, tuple)
        self.reads_ahead = type(iterable) in (range, tuple)  # nobody changes these
        self._history: tuple[int, History] = (0, ())
        self._one_shot = not self._callable and is_iterator(iterable)
        # Of a one-shot iterator; shared by all copies, as that is, and by all graphs over the same generator.
        self._claims: dict[str, tuple[int, object]] = (
            _CLAIMS.setdefault(iterable, {}) if inspect.isgenerator(iterable) else {}
        )
        self._drawing = Turn()
        self._now: DrawnItems | None = None
        self._from: tuple[int, Any] | None = None
        self._stage = ""
        self._draws = Draws()

    def open(self, context: Context) -> None:
        self._stage = context.stage
        self._draws = Draws(context.seed, context.stage)

    def config(self) -> dict[str, Any]:
        length = None if self._callable else length_of(self.iterable)
        name = function_name(self.iterable) if self._callable else type(self.iterable).__qualname__
        return {"items": name, "length": length, "shard": self.shard}

    @property
    def traits(self) -> Traits:
        return Traits(
            seeds_itself=True,
            trusted=True,
            blocks=True,
            in_memory=self._in_memory,
            one_world_size=not self.shard,
            splits_itself=not self.shard,
            resumable=True,
            sees=self._sees,
            reads_once=self.iterable if self._one_shot else None,
            functions=(self.iterable,) if self._callable else (),
        )

    def _sees(self) -> str:
        length = length_of(self.iterable) if self.shard and not self._callable else None
        return "" if length is None else f"{length} items"

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        n = None if self._callable else length_of(self.iterable)
        if n is None:
            return None
        return max(0, -(-(self._left(epoch).count(n) - rank) // world_size)) if self.shard else n

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        if not self.shard:
            return steps
        left = self._left(epoch)
        if not len(left.front):
            first = left.start + rank
            return range(first + steps.start * world_size, first + steps.stop * world_size, world_size)
        numbers = np.arange(steps.start, steps.stop, dtype=np.int64) * world_size + rank
        found: list[int] = left.at(numbers).tolist()
        return found

    def begin_run(self, epoch: int, history: History) -> None:
        if not self.shard:
            super().begin_run(epoch, history)
        self._history = (epoch, check_history(history))
        self._from = None  # of a run that ended before it began to read

    def _left(self, epoch: int) -> Left:
        """What was not consumed of the epoch at other world sizes."""
        return left_of(self._history[1] if epoch == self._history[0] else ())

    def _items(self, epoch: int, resumed: bool) -> Iterable[Any]:
        if self._callable:
            takes_epoch = "epoch" in names_taken(self.iterable)
            made = self.iterable(epoch=epoch) if takes_epoch else self.iterable()
            return made  # type: ignore[no-any-return]
        if self._one_shot:
            mine = (epoch, object())
            claim = self._claims.setdefault("first", mine)  # in one step: two loaders may begin at once
            if claim is not mine and not resumed:
                raise PipegraphError(
                    f"FromIterable: this {type(self.iterable).__name__} can be read once and epoch {claim[0]} has "
                    "done so, of this graph or another; give FromIterable a list, or a callable that returns a new "
                    "iterator"
                )
        return self.iterable  # type: ignore[no-any-return]

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[tuple[int, Any]]:
        blocks = (range(first, first + POSITIONS_AT_ONCE) for first in count(start, POSITIONS_AT_ONCE))
        positions = (self.positions_of(steps, epoch, rank, world_size) for steps in blocks)
        items = self.items(epoch, rank, world_size, start)
        yield from zip(chain.from_iterable(positions), items, strict=False)

    def items(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[Any]:
        stride, offset = (world_size, rank) if self.shard else (1, 0)
        left, number = self._left(epoch), start * stride + offset
        resumed, self._from = self._from, None
        step, state = resumed or (0, None)

        def up_to(step: int) -> int:
            """Items up to that of the step before, with it."""
            return int(left.at(np.array([(step - 1) * stride + offset]))[0]) + 1

        read = up_to(step) if step else 0
        self._draws.one(epoch, (self._stage, read))
        self._now = drawing = self._drawing.begin(self._items(epoch, state is not None), epoch, state)
        items = drawing.items
        if not self._in_memory:
            items = self._draws.each(items, epoch, (self._stage,), read)
        # So many there must be.
        delivered = up_to(start) if start else 0 if len(left.front) else left.start
        if delivered > read:
            read = self._passed(items, read, delivered, epoch)
        wanted: list[Iterator[Any]] = []
        for position in left.front[number::stride].tolist():
            wanted.append(islice(items, position - read, position - read + 1))
            read = position + 1
            number += stride
        wanted.append(islice(items, left.start + number - len(left.front) - read, None, stride))
        found = chain.from_iterable(wanted)
        return found if type(self.iterable) is range else map(copy_containers, found)

    def _passed(self, items: Iterator[Any], read: int, delivered: int, epoch: int) -> int:
        """Pass over the items up to number ``delivered``, which were delivered before the state was saved.

        Raises:
            StateError: there are fewer.
        """
        came = count()
        deque(zip(islice(items, delivered - read), came, strict=False), maxlen=0)
        found = read + next(came)
        if found < delivered:
            raise StateError(
                f"stage {self._stage!r}: {delivered} items of its iterable were delivered in epoch {epoch} when the "
                f"state was saved, and now it ended after {found}, so what followed is lost. Give FromIterable the "
                "same items again: a list, or a callable that returns a new iterator. An iterator or a generator that "
                "was read before, by another loader or graph, has none left"
            )
        return delivered

    def snapshot(self) -> Any:
        return None if self._now is None else self._now.state()

    def restore(self, step: int, snapshot: Any) -> None:
        # None: another loader was reading the same object then.
        self._from = None if snapshot is None else (step, snapshot)


class Turn:
    """A lock for what belongs to the user and is thus shared by all copies; a copied or pickled graph has its own."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self.latest: weakref.ref[DrawnItems] | None = None

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
            self.latest = weakref.ref(drawing)  # no other loader has begun to read the same object since
        return drawing


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
        latest = None if self._turn is None else self._turn.latest
        if self._resumable is None or (latest is not None and latest() is not self):
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
