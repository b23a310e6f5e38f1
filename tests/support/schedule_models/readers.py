"""Models of the block reader: workers, fetch threads and the scheduler on one table of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scheduler.model import Model

from pipegraph import concurrency
from pipegraph.engine.activity import Cancelled
from pipegraph.errors import LoaderClosedError, ShardError
from pipegraph.reader.block_reader import BlockReader
from pipegraph.reader.block_sources import BlockSource
from pipegraph.reader.schedule import RankSteps
from pipegraph.storage.shard_files import BytesFile

BLOCK = 10
"""Bytes of a block."""


class Blocks(BlockSource):
    """Blocks in memory. A block that fails does so once."""

    fetched, stride = True, 4

    def __init__(self, budget: int, failing: set[int]) -> None:
        self.failing = failing
        self.open_now = 0
        self.stopped = False
        self._budget = budget

    def held_nbytes(self, number: int) -> int:
        return BLOCK

    def budget(self) -> int:
        return self._budget

    def open(self, number: int, room: Callable[[int], None]) -> tuple[Any, Any]:
        room(BLOCK)
        if self.stopped:
            raise LoaderClosedError("closed")
        if number in self.failing:
            self.failing.discard(number)
            raise ShardError(f"block {number}")
        self.open_now += 1
        file = BytesFile(b"0123456789", str(number))
        file.close = self.note_closed  # type: ignore[method-assign]
        return file, [{"block": number, "row": row} for row in range(3)]

    def note_closed(self) -> None:
        self.open_now -= 1

    def name(self, number: int) -> str:
        return f"block {number}"

    def close(self) -> None:
        self.stopped = True


class BlockReaderModel(Model):
    """Two workers read the rows of two epochs, a third thread may cancel or close.

    Each row comes from its block, a failed block is an error once a row, and loaded when it is asked for again, the budget is kept (but for
    blocks in use), and at the end every file is closed and every thread gone.
    """

    weight = 3

    def run(self) -> None:
        draw = self.draw
        order = [draw.randrange(4) for _ in range(6)]
        failing = {draw.randrange(4)} if draw.random() < 0.3 else set()
        self.source = Blocks(BLOCK * draw.randrange(2, 5), set(failing))
        self.reader = BlockReader(self.source, draw.random() < 0.8, lambda name, n: None)
        self.lock = concurrency.Lock()
        self.steps = iter([(epoch, step) for epoch in range(2) for step in range(len(order))])
        self.order = order
        self.fails = bool(failing)
        self.ends = draw.random() < 0.3
        blocks = np.array(order)
        for epoch in range(2):
            self.reader.dealt(RankSteps(epoch, 0, len(order), lambda first, last: blocks[first:last]))
        threads = [concurrency.Thread(target=self.work) for _ in range(2)]
        if self.ends:
            threads.append(concurrency.Thread(target=draw.choice([self.reader.cancel, self.reader.close])))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.reader.close()
        assert self.source.open_now == 0, f"{self.source.open_now} files are open"
        assert next(self.steps, None) is None or self.ends

    def work(self) -> None:
        while True:
            with self.lock:
                at = next(self.steps, None)
            if at is None:
                return
            epoch, step = at
            try:
                try:
                    entry = self.reader.acquire(self.order[step], epoch, step)
                except ShardError:
                    assert self.fails, "no block fails"
                    entry = self.reader.acquire(
                        self.order[step], epoch, step
                    )  # asked for again: loaded again
            except Cancelled:
                assert self.ends, "cancelled by nobody"
                return
            if entry.value is None:  # dropped in use: by a close, which gives up on stuck workers too
                assert self.ends, "the block was dropped in use"
                return
            assert entry.value[1] == {"block": self.order[step], "row": 1}
            self.reader.release(entry)
