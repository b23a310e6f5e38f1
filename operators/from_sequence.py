"""FromSequence: the items of any map-style dataset."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from typing import Any, final

import numpy as np
import torch

from pipegraph.chunk import Lineages
from pipegraph.components import SampledIndices
from pipegraph.contracts import Context, Drawn, DrawnRows, Traits
from pipegraph.errors import GraphError, shown
from pipegraph.global_generators import Draws
from pipegraph.nested_samplers import generators_of, nested_samplers, seed_of
from pipegraph.operators.from_iterable import Turn
from pipegraph.operators.ordered import OrderedSource, order_of
from pipegraph.order.base import Order
from pipegraph.order.strided_order import StridedOrder
from pipegraph.parameters import length_of
from pipegraph.tree import PLAIN, copy_containers

LOOPS_CHANGE = (MutableSequence, np.ndarray, torch.Tensor)
"""Data that a training loop may change between epochs, read only once a pass begins."""

IN_MEMORY = (list, tuple, range, np.ndarray, np.memmap, torch.Tensor)
"""Data that is read without a user's code, which a subclass may have."""

ITEMS_AT_ONCE = 16
"""Items asked of a dataset's ``__getitems__`` in one call: most of the gain, little to hold back."""


class _Indices(list[Any]):
    """Indices of a dataset, and the epoch and positions for which they are read, also in a worker's process."""

    def __init__(self, indices: Iterable[Any], epoch: int = 0, positions: list[int] | None = None) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.positions = positions or []

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return _Indices(found, self.epoch, self.positions[at]) if isinstance(at, slice) else found


def _reads_several(dataset: Any) -> bool:
    """Whether a dataset's ``__getitems__`` gives what its ``__getitem__`` does.

    One that it inherits, or has from a dataset that it wraps, does not know of its own ``__getitem__``.
    """
    if "__getitems__" in getattr(dataset, "__dict__", {}):
        return True
    for kind in type(dataset).__mro__:
        if "__getitems__" in vars(kind):
            subset = (kind.__module__, kind.__name__) == ("torch.utils.data.dataset", "Subset")
            return not subset or _reads_several(dataset.dataset)
        if "__getitem__" in vars(kind):
            return False
    return False


@final
class FromSequence(OrderedSource):
    """Any map-style dataset: ``dataset[i]`` for i in the order, or for i in a torch ``Sampler``.

    All workers of the stage and all loaders of the graph use this one dataset object at the same time. If it opens a
    handle at first use (``if self.db is None: ...``), they all use the same handle. If a handle must not be shared,
    keep it in a ``threading.local``, or write a ``Source`` whose ``open(context)`` creates one for each worker.

    With ``epochs=n`` the next epoch is read ahead, but not where a sampler draws it, nor from a list, an array or a
    tensor: the training loop may change these between epochs. Use ``epochs=1`` if it changes another dataset.

    On resume the sampler is iterated again and the indices already delivered are skipped, so it must yield the same
    sequence. Samplers with ``set_epoch`` do; so do samplers with a ``generator`` (its state at the start of the epoch
    is saved, 7 KB), and those that draw from torch's global generator, which is seeded by the graph's seed and the
    epoch. A sampler with another source of randomness needs a ``set_epoch`` that seeds it.

    Args:
        dataset: has ``__len__`` and ``__getitem__``. If its class has ``__getitems__`` too, several rows are read in
            one call; they must come in the order of the indices, as ``torch.utils.data.Subset`` needs them, for a state
            says which rows were delivered by their place.
        order: decides which sample is at which position, from the graph's seed and the epoch.
        sampler: yields the indices of this rank in each epoch, instead of an order. If it has ``set_epoch``, that is
            called.
        shuffle: whether the samples are shuffled in each epoch; by default they are not.

    Raises:
        GraphError: the dataset lacks ``__len__`` or ``__getitem__``; two of ``order``, ``sampler`` and ``shuffle`` are
            given; or a sampler can be iterated once only.
    """

    name = "fromsequence"

    def __init__(
        self,
        dataset: Any,
        order: Order | None = None,
        sampler: Iterable[Any] | None = None,
        shuffle: bool | None = None,
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise GraphError(
                f"FromSequence: the dataset needs __len__ and __getitem__, {type(dataset).__name__} lacks one; "
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
                f"FromSequence: order must be one of pg.order, got {shown(order)}; a torch Sampler goes to sampler="
            )
        super().__init__(order_of(order, shuffle, StridedOrder(shuffle=False), "FromSequence"))
        self.dataset = dataset
        self.sampler = sampler
        self._several = _reads_several(dataset)
        self.draws = sampler is not None
        self.reads_ahead = sampler is None and not isinstance(dataset, LOOPS_CHANGE)
        self._drawing = Turn()
        self._stage = ""
        self._lengths: dict[
            int, int
        ] = {}  # of the epochs begun, for all workers: it may grow in the middle of one
        self._draws = Draws()
        self._sampling = Draws()

    @property
    def traits(self) -> Traits:
        found = replace(
            super().traits,
            group=ITEMS_AT_ONCE if self._several else 1,
            light=not self.draws and type(self.dataset) in IN_MEMORY,
            functions=(type(self.dataset).__getitem__,),
        )
        if not self.draws:
            return found
        nothing = Traits()  # a sampler may be over data of this rank
        return replace(
            found,
            sampled=True,
            resumable=True,
            one_world_size=True,
            splits_itself=True,
            sees=nothing.sees,
            deals_by=nothing.deals_by,
        )

    def open(self, context: Context) -> None:
        super().open(context)
        self._stage = context.stage
        self._lengths = context.share("lengths", dict)
        self._draws = Draws(context.seed, context.stage)
        self._sampling = Draws(context.seed, context.stage)

    def config(self) -> dict[str, Any]:
        length = {"length": len(self.dataset)}
        if self.sampler is None:
            return {**length, **self.order.config()}
        return {**length, "sampler": type(self.sampler).__qualname__, "seed": seed_of(self.sampler)}

    def origin(self) -> str:
        seed = seed_of(self.sampler)
        return "" if seed is None else f"a sampler with seed={seed}"

    def layout(self) -> int:
        return len(self.dataset)

    def layout_of(self, epoch: int) -> int:
        return self._lengths.get(epoch) or len(self.dataset)

    def item(self, index: Any) -> Any:
        return copy_containers(self.dataset[index])

    def read(self, position: Any, epoch: int) -> Any:
        index = self.index_of(position, epoch)
        self._draws.one(epoch, (self._stage, position.position if self.draws else position))
        return self.item(index)

    def indices_of(self, positions: Sequence[Any], epoch: int) -> Sequence[Any]:
        if self.draws:
            drawn = positions
            if not isinstance(drawn, DrawnRows):
                drawn = DrawnRows([], [])
                drawn.extend(positions)
            return _Indices(drawn.indices, epoch, drawn.positions)
        return _Indices(super().indices_of(positions, epoch), epoch, list(positions))

    def read_into(self, found: list[Any], indices: Sequence[Any], start: int) -> None:
        """At once where the dataset can, item by item from one on that fails."""
        if self._several and start == 0:
            try:
                self._draws.several()
                items = list(self.dataset.__getitems__(list(indices[:])))
            except Exception:
                items = []
            if len(items) == len(indices) and not self._draws.drew_for_several():
                found += map(copy_containers, items)
                return
        dataset, add, draws = self.dataset, found.append, self._draws
        given: Any = indices  # as ``indices_of`` has made them
        rows = Lineages(self._stage, given.positions)
        for index in draws.rows(given.epoch, rows, found, start, indices):
            item = dataset[index]
            add(item if item.__class__ in PLAIN else copy_containers(item))
        draws.over()

    def has_length(self) -> bool:
        return self.sampler is None or length_of(self.sampler) is not None

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        if self.sampler is None:
            return super().length(epoch, rank, world_size)
        return length_of(self.sampler)

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[int | Drawn]:
        if self.sampler is None:
            self._lengths[epoch] = len(self.dataset)
            for old in [each for each in list(self._lengths) if each < epoch - 8]:
                self._lengths.pop(old, None)
            return super().positions(epoch, rank, world_size, start)
        self._sampling.one(epoch, ("sampler",))
        indices = self._drawing.begin(self.sampler, epoch).items
        deque(islice(indices, start), maxlen=0)
        numbers = count(start * world_size + rank, world_size)
        return SampledIndices(indices, numbers, self._sampling.again)

    def between(self) -> Any:
        return [generator.get_state() for generator in _generators(self.sampler)] or None

    def restore(self, step: int, snapshot: Any) -> None:
        for generator, state in zip(_generators(self.sampler), snapshot, strict=False):
            generator.set_state(state)

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        if self.sampler is None:
            return super().positions_of(steps, epoch, rank, world_size)
        return [step * world_size + rank for step in steps]

    def index_of(self, position: Any, epoch: int) -> Any:
        return position.index if self.draws else super().index_of(position, epoch)


def _generators(sampler: Any) -> Iterator[torch.Generator]:
    return chain.from_iterable(map(generators_of, nested_samplers(sampler)))
