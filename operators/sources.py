"""Sources that need no storage layer: any iterable, any map-style data set."""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice, repeat
from typing import Any, final

import numpy as np
import torch

from pipegraph.chunk import Lineages
from pipegraph.contracts import Context, Drawn, History, Source
from pipegraph.errors import GraphError, PipegraphError
from pipegraph.foreign_arguments import names_ours
from pipegraph.global_generators import Draws
from pipegraph.operators.hugging_face import forget_state, is_streaming, state_is_exact
from pipegraph.operators.ordered import OrderedSource, order_of
from pipegraph.order import Order, StridedOrder
from pipegraph.order.left import Left, check_history, left_of
from pipegraph.parameters import function_name
from pipegraph.tree import ATOMS, copy_containers

SHARED = ATOMS | {np.ndarray, torch.Tensor, bytes, str}
"""What has no containers to copy."""

ITEMS_AT_ONCE = 16
"""Items asked of a data set's ``__getitems__`` in one call: most of the gain, little to hold back."""


@final
class _Turn:
    """A lock for what belongs to the user and is thus shared by all copies; a copied or pickled graph has its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: weakref.ref[DrawnItems] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Turn, ()

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._lock.locked()

    def begin(self, items: Any, epoch: int, state: Any = None) -> DrawnItems:
        """Begin to read ``items`` in an epoch; ``set_epoch`` is called first where there is one.

        Another loader may set another epoch, or load another state, as soon as the first item is there, and no sooner.

        Args:
            state: one of ``items`` or of its iterator, to resume from.
        """
        resumable = _is_resumable(items) and not isinstance(items, Iterator)
        if not resumable and not hasattr(items, "set_epoch"):
            return DrawnItems(_resumed(_iterator(items), state))
        with self._lock:
            if hasattr(items, "set_epoch"):
                items.set_epoch(epoch)
            if not resumable:
                begun = _iterator(items)
                if _is_resumable(begun):  # it may resume from a state, and then must not have begun
                    return DrawnItems(_resumed(begun, state))
                return DrawnItems(chain(list(islice(begun, 1)), begun))
            if state is not None:
                items.load_state_dict(copy.deepcopy(state))
            begun = _iterator(items)
            first = list(islice(begun, 1))
            if state is not None and is_streaming(items):
                forget_state(items)
            drawing = DrawnItems(chain(first, begun), items, self)
            self._latest = weakref.ref(drawing)
        return drawing

    def is_latest(self, drawing: DrawnItems) -> bool:
        """Whether no other loader has begun to read the same object since."""
        latest = self._latest
        return latest is not None and latest() is drawing


@final
class DrawnItems:
    """What is read of an iterable in one pass.

    Attributes:
        items: those that are left.
    """

    def __init__(self, items: Iterator[Any], resumable: Any = None, turn: _Turn | None = None) -> None:
        self.items = items
        self._resumable: Any = items if resumable is None and _is_resumable(items) else resumable
        self._turn = turn

    def state(self) -> Any:
        """From which another pass can resume where this one stands; None where there is none.

        Of an iterable there is none once another loader has begun to read it: it has one state.
        """
        if self._resumable is None or (self._turn is not None and not self._turn.is_latest(self)):
            return None
        return self._resumable.state_dict()


def _resumed(iterator: Iterator[Any], state: Any) -> Iterator[Any]:
    if state is not None:
        iterator.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
    return iterator


def _is_resumable(items: Any) -> bool:
    """Whether it has ``state_dict()`` and ``load_state_dict(state)``; some have methods so named that ask for more."""
    try:
        inspect.signature(items.state_dict).bind()
        inspect.signature(items.load_state_dict).bind(None)
    except (AttributeError, TypeError, ValueError):
        return False
    return not is_streaming(items) or state_is_exact(items)


def _iterator(items: Any) -> Iterator[Any]:
    """As ``iter``; but what only answers to indices is asked for ``len`` items, for it may answer to any index."""
    if not hasattr(items, "__iter__") and hasattr(items, "__len__"):
        return map(items.__getitem__, range(len(items)))
    return iter(items)


def _length_of(items: Any) -> int | None:
    """How many there are; None where that is not known, which ``len`` may say only when it is asked."""
    try:
        return len(items)
    except (
        TypeError,
        NotImplementedError,
    ):  # torch's DataLoader over an IterableDataset has a ``__len__`` too
        return None


@final
class FromIterable(Source):
    """The items of an iterable, or those of what a callable returns, anew for each epoch.

    A callable with a parameter ``epoch`` gets it. An iterator (which can be read once) serves one
    epoch. Resuming reads an iterable again and drops what was delivered, which costs that time and
    needs items that repeat; where the iterator or the iterable has ``state_dict()`` and ``load_state_dict(state)``, as
    Hugging Face's streaming data sets and torchdata's loaders have, it resumes from its own state. A Hugging Face data
    set with a shuffle buffer is read again, since the buffer is not in its state: use ``Shuffle`` behind it instead.

    Args:
        iterable: the items, or a callable that returns them.
        shard: rank r of W takes items r, r+W, r+2W ...; with False every rank takes all.
    """

    own_numbers = True
    default_name = "fromiterable"
    bundles = True

    @names_ours
    def __init__(self, iterable: Iterable[Any] | Callable[..., Iterable[Any]], shard: bool = True) -> None:
        function = getattr(iterable, "func", iterable)  # of a partial
        if hasattr(iterable, "__aiter__") or inspect.isasyncgenfunction(function):
            raise GraphError(
                f"FromIterable: {iterable!r} is iterated with `async for`, which a source cannot; give it the plain "
                "items to fetch, and fetch each in an async function behind it: .then(fetch, workers=16)"
            )
        # Of the type: a class has the __iter__ of its instances and is called to make one.
        self._callable = callable(iterable) and not hasattr(type(iterable), "__iter__")
        if not self._callable and not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
            raise GraphError(
                f"FromIterable: an iterable or a callable that returns one is needed, got {iterable!r}"
            )
        self.iterable: Any = iterable
        self.shard = shard
        self.elastic = shard
        self.never_waits = type(iterable) in (list, range, tuple)
        self._history: tuple[int, History] = (0, ())
        self._one_shot = not self._callable and isinstance(iterable, Iterator)
        self._claims: dict[
            str, tuple[int, object]
        ] = {}  # of a one-shot iterator, shared by all copies as that is
        self._drawing = _Turn()
        self._now: DrawnItems | None = None
        self._from: tuple[int, Any] | None = None
        self._stage = ""
        self._draws = Draws()

    def open(self, context: Context) -> None:
        self._stage = context.stage
        self._draws = Draws(context.seed, context.stage)

    def config(self) -> dict[str, Any]:
        length = None if self._callable else _length_of(self.iterable)
        name = function_name(self.iterable) if self._callable else type(self.iterable).__qualname__
        return {"items": name, "length": length, "shard": self.shard}

    def functions(self) -> Sequence[Callable[..., Any]]:
        return (self.iterable,) if self._callable else ()

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        n = None if self._callable else _length_of(self.iterable)
        if n is None:
            return None
        return max(0, -(-(self._left(epoch).count(n) - rank) // world_size)) if self.shard else n

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        if not self.shard:
            return steps
        numbers = np.arange(steps.start, steps.stop, dtype=np.int64) * world_size + rank
        found: list[int] = self._left(epoch).at(numbers).tolist()
        return found

    def begin_run(self, epoch: int, history: History) -> None:
        if not self.shard:
            super().begin_run(epoch, history)
        self._history = (epoch, history)
        self._from = None  # of a run that ended before it began to read

    def _left(self, epoch: int) -> Left:
        """What was not consumed of the epoch at other world sizes."""
        return left_of(check_history(self._history[1] if epoch == self._history[0] else ()))

    def _items(self, epoch: int, resumed: bool) -> Iterable[Any]:
        if self._callable:
            takes_epoch = "epoch" in _parameters(self.iterable)
            made = self.iterable(epoch=epoch) if takes_epoch else self.iterable()
            return made  # type: ignore[no-any-return]
        if self._one_shot:
            mine = (epoch, object())
            claim = self._claims.setdefault("first", mine)  # in one step: two loaders may begin at once
            if claim is not mine and not resumed:
                raise PipegraphError(
                    f"FromIterable: this {type(self.iterable).__name__} can be read once and epoch {claim[0]} has "
                    "done so; give FromIterable a list, or a callable that returns a new iterator"
                )
        return self.iterable  # type: ignore[no-any-return]

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[tuple[int, Any]]:
        stride, offset = (world_size, rank) if self.shard else (1, 0)
        left, number = self._left(epoch), start * stride + offset
        resumed, self._from = self._from, None
        read, state = 0, None
        if resumed is not None:
            step, state = resumed
            read = int(left.at(np.array([(step - 1) * stride + offset]))[0]) + 1
        self._draws.one(epoch, (self._stage, read))
        self._now = drawing = self._drawing.begin(self._items(epoch, resumed is not None), epoch, state)
        items = drawing.items
        if not self.never_waits:
            items = self._draws.each(items, epoch, (self._stage,), read)
        for position in left.front[number::stride].tolist():
            for item in islice(items, position - read, position - read + 1):
                yield position, item if item.__class__ in SHARED else copy_containers(item)
            read = position + 1
            number += stride
        first = left.start + number - len(left.front)
        for turn, item in enumerate(islice(items, first - read, None, stride)):
            yield (
                first + turn * stride,
                item if item.__class__ in SHARED else copy_containers(item),
            )

    def snapshot(self) -> Any:
        return None if self._now is None else self._now.state()

    def restore(self, step: int, snapshot: Any) -> None:
        # None: another loader was reading the same object then.
        self._from = None if snapshot is None else (step, snapshot)


@final
class _Indices(list[Any]):
    """Indices of a data set, and the epoch and positions for which they are read, also in a worker's process."""

    def __init__(self, indices: Iterable[Any], epoch: int = 0, positions: list[int] | None = None) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.positions = positions or []

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return _Indices(found, self.epoch, self.positions[at]) if isinstance(at, slice) else found


@final
class _Sampled(Iterator[Drawn]):
    """What a sampler gives, with its positions."""

    def __init__(self, indices: Iterator[Any], positions: Iterator[int], draws: Draws) -> None:
        self._indices = indices
        self._positions = positions
        self._draws = draws

    def __next__(self) -> Drawn:
        self._draws.again()  # other stages may have worked in this thread since
        index = next(self._indices)
        return Drawn(next(self._positions), index)

    def draw_into(self, drawn: list[Any], rows: int) -> None:
        """As many calls of ``next``, at a tenth of their cost."""
        self._draws.again()
        indices: list[Any] = []
        try:
            indices.extend(islice(self._indices, rows))  # what was drawn before an error stays
        finally:
            positions = islice(self._positions, len(indices))
            drawn.extend(map(tuple.__new__, repeat(Drawn), zip(positions, indices, strict=True)))


def _parameters(function: Any) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


@final
class FromSequence(OrderedSource):
    """Any map-style data set: ``dataset[i]`` for i in the order, or for i in a torch ``Sampler``.

    The data set is one object, which all workers of the stage and all loaders of the graph use at once. One that opens
    a handle at first use (``if self.db is None: ...``) gives them all the same handle; where that may not be shared,
    keep it in a ``threading.local``, or write a ``Source`` whose ``open(context)`` makes one for each worker.

    Resuming draws from a sampler again and drops what was delivered: it must draw the same, as one with a seeded
    generator of its own or with ``set_epoch`` does. One without gets the epoch's from the graph's seed.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        order: which sample at which position; it gets the graph's seed and the pass's epoch as they are.
        sampler: gives the indices of this rank instead, in each epoch; ``set_epoch`` is called where it has one.
        shuffle: whether the default order shuffles; by default data sets and files come as they lie, shards shuffled.
    """

    default_name = "fromsequence"
    bundles = True

    @names_ours
    def __init__(
        self,
        dataset: Any,
        order: Order | None = None,
        sampler: Iterable[Any] | None = None,
        shuffle: bool | None = None,
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise GraphError(
                f"FromSequence: the data set needs __len__ and __getitem__, {type(dataset).__name__} lacks one; "
                "use FromIterable for what can only be iterated"
            )
        if sampler is not None and (order is not None or shuffle is not None):
            raise GraphError("FromSequence: give an order (or shuffle=) or a sampler, not both")
        if sampler is not None and (isinstance(sampler, Iterator) or not isinstance(sampler, Iterable)):
            raise GraphError(
                f"FromSequence: a sampler gives its indices anew for each epoch, and this {type(sampler).__name__} "
                "does not; use a list, or a torch Sampler"
            )
        if order is not None and not isinstance(order, Order):
            raise GraphError(
                f"FromSequence: order must be one of pg.order, got {order!r}; a torch Sampler goes to sampler="
            )
        super().__init__(order_of(order, shuffle, StridedOrder(shuffle=False), "FromSequence"))
        self.dataset = dataset
        self.sampler = sampler
        self.group = ITEMS_AT_ONCE if callable(getattr(dataset, "__getitems__", None)) else 1
        self.elastic = sampler is None
        self.draws = sampler is not None
        self._drawing = _Turn()
        self._stage = ""
        self._draws = Draws()
        self._sampling = Draws()

    def open(self, context: Context) -> None:
        super().open(context)
        self._stage = context.stage
        self._draws = Draws(context.seed, context.stage)
        self._sampling = Draws(context.seed, context.stage)

    def config(self) -> dict[str, Any]:
        drawn = self.order.config() if self.sampler is None else {"sampler": type(self.sampler).__qualname__}
        return {"length": len(self.dataset), **drawn}

    def functions(self) -> Sequence[Callable[..., Any]]:
        return (type(self.dataset).__getitem__,)

    def layout(self) -> int:
        return len(self.dataset)

    def item(self, index: Any) -> Any:
        return copy_containers(self.dataset[index])

    def read(self, position: Any, epoch: int) -> Any:
        index = self.index_of(position, epoch)
        self._draws.one(epoch, (self._stage, position.position if self.draws else position))
        return self.item(index)

    def read_many(self, positions: Sequence[Any], epoch: int) -> Sequence[Any]:
        indices = [self.index_of(position, epoch) for position in positions]
        self._draws.several()
        return [copy_containers(item) for item in self.dataset.__getitems__(indices)]

    def indices_of(self, positions: Sequence[Any], epoch: int) -> Sequence[Any]:
        if self.draws:
            places, indices = zip(*positions, strict=True)
            return _Indices(indices, epoch, list(places))
        return _Indices(super().indices_of(positions, epoch), epoch, list(positions))

    def read_into(self, found: list[Any], indices: Sequence[Any], start: int) -> None:
        """At once where the data set can, item by item from one on that fails."""
        if self.group > 1 and start == 0:
            try:
                self._draws.several()
                items = list(self.dataset.__getitems__(list(indices)))
            except Exception:
                items = []
            if len(items) == len(indices):
                found += [copy_containers(item) for item in items]
                return
        dataset, add, draws = self.dataset, found.append, self._draws
        given: Any = indices  # as ``indices_of`` has made them
        seed_others = draws.rows(given.epoch, Lineages(self._stage, given.positions), found, start)
        for row, index in enumerate(islice(indices, start, None), start):
            if seed_others:
                draws.seed_others(row)
            item = dataset[index]
            add(item if item.__class__ in SHARED else copy_containers(item))
        draws.over()

    def has_length(self) -> bool:
        return self.sampler is None or _length_of(self.sampler) is not None

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        if self.sampler is None:
            return super().length(epoch, rank, world_size)
        return _length_of(self.sampler)

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[int | Drawn]:
        if self.sampler is None:
            return super().positions(epoch, rank, world_size, start)
        self._sampling.one(epoch, ("sampler",))
        indices = self._drawing.begin(self.sampler, epoch).items
        deque(islice(indices, start), maxlen=0)
        return _Sampled(indices, count(start * world_size + rank, world_size), self._sampling)

    def draw_into(self, drawn: list[Any], positions: Iterator[Any], rows: int) -> None:
        if isinstance(positions, _Sampled):
            positions.draw_into(drawn, rows)
        else:
            super().draw_into(drawn, positions, rows)

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        if self.sampler is None:
            return super().positions_of(steps, epoch, rank, world_size)
        return [step * world_size + rank for step in steps]

    def index_of(self, position: Any, epoch: int) -> Any:
        return position.index if self.draws else super().index_of(position, epoch)

    def substitute(self, position: int, epoch: int, attempt: int) -> int | None:
        return super().substitute(position, epoch, attempt) if self.sampler is None else None
