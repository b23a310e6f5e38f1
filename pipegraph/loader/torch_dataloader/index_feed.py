"""Deals batch indices to the workers in turn.

In a ``DataLoader`` the consumer's thread draws them, as torch's does, so that samplers are called there and as far
ahead; in a graph that is used by itself, the thread of whichever worker needs one first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from pipegraph import concurrency
from pipegraph.engine.activity import Cancelled
from pipegraph.loader.torch_dataloader.batch_progress import Remaining

_END = object()


class IndexFeed:
    """Indices that one thread draws, dealt in turn to ``shares`` workers, whose threads take them."""

    def __init__(self, shares: int) -> None:
        self._count = shares
        self._cancelled = False
        self._shares: list[concurrency.SimpleQueue[Any]] = []
        self._over = True

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexFeed, (self._count,)  # a worker's process is sent its indices one by one

    def restart(self, indices: Iterator[Any], remaining: Remaining) -> None:
        """The indices of another epoch's ``remaining`` batches follow; the epoch before has no more."""
        self.end()
        self._indices = indices
        self.remaining = remaining
        self._shares = [concurrency.SimpleQueue() for _ in range(self._count)]
        self._turn = remaining.first % self._count
        self._over = False

    def draw(self) -> None:
        """Draw the next index, if there is one."""
        if not self._over:
            try:
                self._shares[self._turn].put(next(self._indices))
                self._turn = (self._turn + 1) % self._count
            except StopIteration:
                self.end()

    def end(self) -> None:
        """The epoch has no more indices; thread-safe."""
        self._over = True
        for share in self._shares:
            share.put(_END)

    def begin(self) -> None:
        """A run begins, in which nobody has read anything yet; :meth:`restart` was called."""

    def indices_of(self, epoch: int, worker: int) -> Iterator[Any]:
        """The indices of one worker, in their order; may block."""
        share = self._shares[worker]
        while not self._cancelled and (index := share.get()) is not _END:
            yield index
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """End an ``indices_of`` that blocks with ``Cancelled``; thread-safe."""
        self._cancelled = True
        self.end()

    def uncancel(self) -> None:
        self._cancelled = False


class DrawnIndices:
    """Indices drawn from a sampler, anew for each epoch, by whichever worker's thread needs one first. Thread-safe."""

    remaining = Remaining()

    def __init__(self, sampler: Iterable[Any], shares: int) -> None:
        self._sampler: Any = sampler
        self._count = shares
        self._lock = concurrency.Lock()
        self._epochs: dict[int, tuple[Iterator[tuple[int, Any]], list[deque[Any]]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return DrawnIndices, ((), self._count)

    def begin(self) -> None:
        with self._lock:
            self._epochs.clear()

    def indices_of(self, epoch: int, worker: int) -> Iterator[Any]:
        while True:
            with self._lock:
                if epoch not in self._epochs:
                    self._epochs.pop(epoch - 2, None)
                    samplers: tuple[Any, ...] = (self._sampler, getattr(self._sampler, "sampler", None))
                    for sampler in samplers:
                        if hasattr(sampler, "set_epoch"):
                            sampler.set_epoch(epoch)
                    shares = [deque[Any]() for _ in range(self._count)]
                    self._epochs[epoch] = (enumerate(self._sampler), shares)
                drawn, shares = self._epochs[epoch]
                while not shares[worker]:
                    found = next(drawn, None)
                    if found is None:
                        return
                    shares[found[0] % self._count].append(found[1])
                index = shares[worker].popleft()
            yield index

    def cancel(self) -> None:
        """It never blocks."""

    uncancel = cancel


WorkerIndices = IndexFeed | DrawnIndices
"""Where a worker's stage takes its indices from, and the batches that they are of."""
