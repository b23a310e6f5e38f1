"""Deals batch indices to the workers in turn.

In a ``DataLoader`` the consumer's thread draws them, as torch's does, so that samplers are called there and as far
ahead; a graph that is used by itself draws them when its workers want more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from pipegraph import concurrency
from pipegraph.engine.activity import Cancelled
from pipegraph.loader.torch_dataloader.batch_progress import Remaining


class IndexFeed:
    """Indices that one thread puts and the threads of ``shares`` workers take, dealt in turn. Thread-safe."""

    def __init__(self, shares: int) -> None:
        self._changed = concurrency.Condition()
        self._count = shares
        self._cancelled = False
        self._shares: list[deque[Any]] = []
        self._next = 0
        self._ended: list[bool] = [False]
        self.restart()

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexFeed, (self._count,)  # a worker's process is sent its indices one by one

    def restart(self, first: int = 0, remaining: Remaining = Remaining()) -> None:  # noqa: B008 (frozen)
        """The indices of another epoch's ``remaining`` batches follow, for share ``first`` first; consumers of those
        before get no more."""
        with self._changed:
            self.remaining = remaining
            self._shares = [deque() for _ in range(self._count)]
            self._ended = [False]
            self._next = first

    def put(self, index: Any) -> None:
        with self._changed:
            self._shares[self._next].append(index)
            self._next = (self._next + 1) % self._count
            self._changed.notify_all()

    def end(self) -> None:
        """The epoch has no more indices."""
        with self._changed:
            self._ended[0] = True
            self._changed.notify_all()

    def begin(self) -> None:
        """A run begins, in which nobody has read anything yet; :meth:`restart` was called."""

    def indices_of(self, epoch: int, worker: int) -> Iterator[Any]:
        """The indices of one worker, in their order; may block."""
        with self._changed:
            share, ended = self._shares[worker], self._ended
        while True:
            with self._changed:
                while not share and not ended[0] and not self._cancelled:
                    self._changed.wait()
                if self._cancelled:
                    raise Cancelled
                if not share:
                    return
                index = share.popleft()
            yield index

    def cancel(self) -> None:
        """End an ``indices_of`` that blocks with ``Cancelled``; thread-safe."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def uncancel(self) -> None:
        with self._changed:
            self._cancelled = False


class DrawnIndices:
    """Indices drawn from a sampler, anew for each epoch, by whichever worker's thread wants one first. Thread-safe."""

    def __init__(self, sampler: Iterable[Any], shares: int) -> None:
        self.remaining = Remaining()
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

    def uncancel(self) -> None:
        """It never blocks."""


WorkerIndices = IndexFeed | DrawnIndices
"""Where a worker's stage takes its indices from, and the batches that they are of."""
