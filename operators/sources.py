"""Sources that need no storage layer: any iterable, any map-style data set."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import numpy as np

from pipegraph.contracts import Context, Source
from pipegraph.errors import GraphError, PipegraphError
from pipegraph.operators.functions import function_name
from pipegraph.order import Order, StridedOrder
from pipegraph.tree import copy_containers

POSITIONS_AT_ONCE = 1024
"""Positions drawn from an order in one call: the cost of a draw is shared, the array stays in cache."""


@final
class FromIterable(Source):
    """The items of an iterable, or those of what a callable returns, anew for each epoch.

    A callable with a parameter ``epoch`` gets it. An iterator (which can be read once) serves one
    epoch. Resuming reads an iterable again and drops what was delivered, which costs that time and
    needs items that repeat; an iterator with ``state_dict``/``load_state_dict`` goes on from its own state.

    Args:
        iterable: the items, or a callable that returns them.
        shard: rank r of W takes items r, r+W, r+2W ...; with False every rank takes all.
    """

    elastic = False
    default_name = "fromiterable"

    def __init__(self, iterable: Iterable[Any] | Callable[..., Iterable[Any]], shard: bool = True) -> None:
        self._callable = callable(iterable) and not hasattr(iterable, "__iter__")
        if not self._callable and not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
            raise GraphError(
                f"FromIterable: an iterable or a callable that returns one is needed, got {iterable!r}"
            )
        self.iterable: Any = iterable
        self.shard = shard
        self._one_shot = not self._callable and isinstance(iterable, Iterator)
        self._used: list[int] = []  # shared by all copies: the epoch that used a one-shot iterator up

    def config(self) -> dict[str, Any]:
        length = len(self.iterable) if not self._callable and hasattr(self.iterable, "__len__") else None
        name = function_name(self.iterable) if self._callable else type(self.iterable).__qualname__
        return {"items": name, "length": length, "shard": self.shard}

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        if self._callable or not hasattr(self.iterable, "__len__"):
            return None
        n = len(self.iterable)
        return max(0, -(-(n - rank) // world_size)) if self.shard else n

    def position_of(self, step: int, epoch: int, rank: int, world_size: int) -> int:
        return step * world_size + rank if self.shard else step

    def _items(self, epoch: int) -> Iterable[Any]:
        if self._callable:
            takes_epoch = "epoch" in _parameters(self.iterable)
            made = self.iterable(epoch=epoch) if takes_epoch else self.iterable()
            return made  # type: ignore[no-any-return]
        if self._one_shot:
            if self._used and self._used[0] != epoch:
                raise PipegraphError(
                    f"FromIterable: this {type(self.iterable).__name__} can be read once and epoch {self._used[0]} has "
                    "done so; give FromIterable a list, or a callable that returns a new iterator"
                )
            self._used.append(epoch)
        return self.iterable  # type: ignore[no-any-return]

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[tuple[int, Any]]:
        items = iter(self._items(epoch))
        stride, offset = (world_size, rank) if self.shard else (1, 0)
        first = start * stride + offset
        for position, item in enumerate(itertools.islice(items, first, None, stride)):
            yield first + position * stride, copy_containers(item)


def _parameters(function: Any) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


@final
class FromSequence(Source):
    """Any map-style data set: ``dataset[i]`` for i in the order, or for i in a torch ``Sampler``.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        order: which sample at which position; it gets the graph's seed and the pass's epoch as they are.
        sampler: gives the indices of this rank instead, in each epoch; ``set_epoch`` is called where it has one.
    """

    random_access = True
    default_name = "fromsequence"

    def __init__(
        self, dataset: Any, order: Order | None = None, sampler: Iterable[int] | None = None
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise GraphError(
                f"FromSequence: the data set needs __len__ and __getitem__, {type(dataset).__name__} lacks one; "
                "use FromIterable for what can only be iterated"
            )
        if order is not None and sampler is not None:
            raise GraphError("FromSequence: give an order or a sampler, not both")
        if order is not None and not isinstance(order, Order):
            raise GraphError(
                f"FromSequence: order must be one of pg.order, got {order!r}; a torch Sampler goes to sampler="
            )
        self.dataset = dataset
        self.order: Order = order if order is not None else StridedOrder(shuffle=False)
        self.sampler = sampler
        self.elastic = sampler is None
        self._seed, self._world_size = 0, 1
        self._block: tuple[tuple[int, int], list[int]] | None = None
        self._indices: dict[int, list[int]] = {}  # the sampler's, by epoch; shared by all copies

    def config(self) -> dict[str, Any]:
        drawn = self.order.config() if self.sampler is None else {"sampler": type(self.sampler).__qualname__}
        return {"length": len(self.dataset), **drawn}

    def open(self, context: Context) -> None:
        self._seed, self._world_size = context.seed, context.world_size

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        if self.sampler is not None:
            return len(self.sampler) if hasattr(self.sampler, "__len__") else None
        n = len(self.dataset)
        return self.order.length(n, world_size, (), rank, self._seed, epoch) if n else 0

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[int]:
        if self.sampler is not None:
            yield from self._sampled(epoch, rank, world_size, start)
            return
        n = len(self.dataset)
        stop = self.length(epoch, rank, world_size)
        assert stop is not None
        for first in range(start, stop, POSITIONS_AT_ONCE):
            last = min(stop, first + POSITIONS_AT_ONCE)
            yield from self.order.positions(n, self._seed, epoch, rank, world_size, first, last).tolist()

    def _sampled(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[int]:
        sampler = self.sampler
        assert sampler is not None
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        # The draws of a sampler without a fixed length are kept as they come, for the workers to read.
        indices = self._indices[epoch] = []
        for old in [e for e in self._indices if e < epoch - 1]:
            self._indices.pop(old, None)
        for step, index in enumerate(sampler):
            indices.append(index)
            if step >= start:
                yield step * world_size + rank

    def _index(self, position: int, epoch: int) -> Any:
        if self.sampler is not None:
            return self._indices[epoch][position // self._world_size]
        base = position - position % POSITIONS_AT_ONCE
        block = self._block
        if block is None or block[0] != (epoch, base):
            drawn = np.arange(base, base + POSITIONS_AT_ONCE)
            indices = self.order.samples_at(len(self.dataset), drawn, self._seed, epoch).tolist()
            block = self._block = ((epoch, base), indices)
        return block[1][position - base]

    def index_of(self, position: int, epoch: int) -> Any:
        """The data set's index at a position."""
        return self._index(position, epoch)

    def read(self, position: int, epoch: int) -> Any:
        return copy_containers(self.dataset[self._index(position, epoch)])

    def window(self, position: int) -> range:
        n = len(self.dataset)
        start = position % n - position % n % 1024
        return range(start, min(start + 1024, n))
