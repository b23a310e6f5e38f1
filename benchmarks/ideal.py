"""The hand-written loop that the image benchmarks measure against."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
from images import BATCH, WORKERS
from peers import PREFETCH

Fill = Callable[[str, Any], None]
"""Writes the image of a path into one row of a batch's buffer."""


@contextmanager
def hand_written(
    paths: Sequence[str],
    make_fill: Callable[[], Fill],
    shape: tuple[int, ...],
    dtype: Any,
    workers: int = WORKERS,
    ready: int = PREFETCH,
) -> Iterator[Any]:
    """Threads that each fill whole batches in a ring of reused buffers; batches in order, bounded.

    No statistics, no error handling, no state: only the work, with the same cores. ``make_fill`` is called once in each
    thread; ``shape`` is that of one row, and ``ready`` batches wait.
    """
    import torch

    local = threading.local()

    def start() -> None:
        local.fill = make_fill()

    def filled(number: int, buffer: Any) -> Any:
        for row in range(BATCH):
            local.fill(paths[(number * BATCH + row) % len(paths)], buffer[row])
        return buffer

    def batches() -> Iterator[Any]:
        buffers = [np.empty((BATCH, *shape), dtype) for _ in range(ready + workers)]
        flight = deque(pool.submit(filled, *each) for each in enumerate(buffers))
        for number in count(len(buffers)):
            buffer = flight.popleft().result()
            yield torch.from_numpy(buffer)
            flight.append(pool.submit(filled, number, buffer))

    with ThreadPoolExecutor(workers, initializer=start) as pool:
        yield batches()
        pool.shutdown(cancel_futures=True)
