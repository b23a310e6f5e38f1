"""The hand-written loop that the image benchmarks measure against."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from images import BATCH, WORKERS
from peers import PREFETCH

Fill = Callable[[str, Any], None]
"""Writes the image of a path into one row of a batch's buffer."""


class HandWritten:
    """Threads that each fill whole batches in a ring of reused buffers; batches in order, bounded.

    No statistics, no error handling, no state: only the work, with the same cores.

    Args:
        paths: the photographs, taken over and over.
        make_fill: called once in each thread.
        shape: of one row.
        dtype: of the buffers.
        workers: how many threads.
        ready: batches made and waiting.
    """

    def __init__(
        self,
        paths: Sequence[str],
        make_fill: Callable[[], Fill],
        shape: tuple[int, ...],
        dtype: Any,
        workers: int = WORKERS,
        ready: int = PREFETCH,
    ) -> None:
        self.paths = paths
        self.make_fill = make_fill
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.free = deque(np.empty((BATCH, *shape), dtype) for _ in range(ready + workers + 1))
        self.ready: dict[int, Any] = {}
        self.claimed = 0
        self.closed = False
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(workers)]
        for thread in self.threads:
            thread.start()

    def work(self) -> None:
        """Claim the next batch and a buffer, fill it, hand it over."""
        fill = self.make_fill()
        while True:
            with self.lock:
                while not self.free and not self.closed:
                    self.changed.wait()
                if self.closed:
                    return
                number, buffer = self.claimed, self.free.popleft()
                self.claimed += 1
            for row in range(BATCH):
                fill(self.paths[(number * BATCH + row) % len(self.paths)], buffer[row])
            with self.lock:
                self.ready[number] = buffer
                self.changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        import torch

        number = 0
        while True:
            with self.lock:
                while number not in self.ready:
                    self.changed.wait()
                buffer = self.ready.pop(number)
            yield torch.from_numpy(buffer)
            with self.lock:
                self.free.append(buffer)
                self.changed.notify_all()
            number += 1

    def __enter__(self) -> HandWritten:
        return self

    def __exit__(self, *exception: object) -> None:
        with self.lock:
            self.closed = True
            self.changed.notify_all()
        for thread in self.threads:
            thread.join()
