"""Interleave: items of many files, several of them open at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from pipegraph.contracts import Context, Source, Traits
from pipegraph.errors import GraphError, shown
from pipegraph.integers import integer
from pipegraph.operators.ordered import order_of
from pipegraph.order import Order, StridedOrder
from pipegraph.parameters import function_name, iterator_of, without_rewind
from pipegraph.tree import copy_containers


@dataclass(slots=True)
class _Open:
    """A file that is being read."""

    number: int  # among those of this rank, in the order in which they are opened
    items: Iterator[Any]
    read: int


@final
class Interleave(Source):
    """Items of many files in turn, ``cycle`` of them open at a time.

    Each open file gives one item, round by round; where one ends the next of the order is opened in its place, until
    all have been read. The files are dealt to the ranks; how many items a rank has is not known before. One worker
    reads. A resume opens the files again that were open and drops what was read of them, which costs that time:
    ``open`` must give a file's items in the same order each time. An iterator that has a ``close`` (a generator) is
    closed when it ends and when the loader closes.

    Args:
        files: what is opened, one by one: paths, or anything else.
        open: of one of ``files``, an iterable of its items.
        cycle: files that are open at a time.
        order: in which the files are opened, as ``FromSequence`` takes it; by default as they are given.
        shuffle: whether the default order shuffles the files.

    Raises:
        GraphError: ``files`` is no list, ``open`` cannot be called, ``cycle`` is below 1, or both ``order`` and
            ``shuffle`` are given.
    """

    traits = Traits(trusted=True, one_world_size=True, resumable=True)
    name = "interleave"

    def __init__(
        self,
        files: Sequence[Any],
        open: Callable[[Any], Iterable[Any]],
        cycle: int = 16,
        order: Order | None = None,
        shuffle: bool | None = None,
    ) -> None:
        if isinstance(files, str) or not hasattr(files, "__getitem__"):
            raise GraphError(f"Interleave: files must be a list of files, got {shown(files)}")
        if not callable(open):
            raise GraphError(f"Interleave: open must be a function of a file, got {shown(open)}")
        self.files = files
        self.function = open
        self.cycle = integer(cycle, "Interleave: cycle")
        self.order = order_of(order, shuffle, StridedOrder(shuffle=False), "Interleave")
        self._seed = 0
        self._at: Any = None
        self._from: Any = None

    def config(self) -> dict[str, Any]:
        opened = function_name(self.function)
        return {"files": len(self.files), "open": opened, "cycle": self.cycle, **self.order.config()}

    def open(self, context: Context) -> None:
        self._seed = context.seed

    def _mine(self, epoch: int, rank: int, world_size: int) -> list[int]:
        """This rank's files in the order in which they are opened; what pads a rank's share is left out."""
        count = len(self.files)
        if not count:
            return []
        steps = self.order.length(count, world_size, (), rank, self._seed, epoch)
        places = self.order.positions(count, self._seed, epoch, rank, world_size, 0, steps, ())
        indices: list[int] = self.order.samples_at(count, places[places < count], self._seed, epoch).tolist()
        return indices

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[tuple[int, Any]]:
        mine = self._mine(epoch, rank, world_size)
        step, following, turn = 0, 0, 0
        opened: list[_Open] = []
        if self._from is not None:
            step, (following, turn, known) = self._from
            self._from = None
            opened = [self._reopened(mine, number, read) for number, read in known]
        try:
            while True:
                while following < len(mine) and len(opened) < self.cycle:
                    opened.append(self._reopened(mine, following, 0))
                    following += 1
                if not opened:
                    return
                turn %= len(opened)
                file = opened[turn]
                self._at = (following, turn, opened)
                try:
                    item = next(file.items)
                except StopIteration:
                    _close(file)
                    if following < len(mine):
                        opened[turn] = self._reopened(mine, following, 0)
                        following += 1
                    else:
                        del opened[turn]
                    continue
                file.read += 1
                turn += 1
                self._at = (following, turn, opened)
                step += 1
                if step > start:
                    yield (step - 1) * world_size + rank, copy_containers(item)
        finally:
            self._at = None
            for file in opened:
                _close(file)

    def _reopened(self, mine: Sequence[int], number: int, read: int) -> _Open:
        items = iterator_of(self.function(self.files[mine[number]]))
        for _ in zip(range(read), without_rewind(items), strict=False):
            pass
        return _Open(number, items, read)

    def snapshot(self) -> Any:
        if self._at is None:  # nothing is open: not begun, or at its end
            return None
        following, turn, opened = self._at
        return [following, turn, [[file.number, file.read] for file in opened]]

    def restore(self, step: int, snapshot: Any) -> None:
        self._from = (step, snapshot)


def _close(file: _Open) -> None:
    close = getattr(file.items, "close", None)
    if close is not None:
        close()
