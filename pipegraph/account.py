"""The memory account of one loader: which buffers are alive, and who must wait for room.

Rules (what differs from them is a bug):

* A buffer counts once, from the moment a stage has made it until the last chunk that refers to it
  has been delivered or dropped.
* Before a worker makes something, it *reserves* what the largest such thing has taken so far. It
  waits while ``used + reservation`` is above its stage's ceiling: the limit less one item of every
  stage further down, so that what lies downstream can always go on and make room.
* Of the waiting workers the one furthest down goes first.
"""

from __future__ import annotations

import threading
from time import perf_counter_ns

from pipegraph.activity import Activity, Cancelled, Waiter
from pipegraph.errors import MemoryLimitError
from pipegraph.units import format_bytes

Buffers = tuple[tuple[int, int], ...]


class StageAccount:
    """One stage's part of the account.

    Attributes:
        depth: 0 for the stage next to the consumer, growing upstream.
        largest: the most bytes that one call has added so far.
        wait_ns: nanoseconds that its workers have waited for room.
    """

    __slots__ = ("depth", "headroom", "largest", "name", "wait_ns")

    def __init__(self, name: str, depth: int) -> None:
        self.name = name
        self.depth = depth
        self.largest = 0
        self.headroom = 0
        self.wait_ns = 0


class Account:
    """See the module docstring. One lock; waiters are woken under it and re-check.

    Args:
        limit: bytes.
        activity: counts the waiting threads.
    """

    def __init__(self, limit: int, activity: Activity) -> None:
        self.limit = limit
        self.activity = activity
        self.used = 0
        self.peak = 0
        self.stages: list[StageAccount] = []
        self._lock = threading.Lock()
        self._references: dict[int, list[int]] = {}
        self._waiting: list[tuple[StageAccount, Waiter]] = []
        self._cancelled = False

    def stage(self, name: str, depth: int) -> StageAccount:
        """Open the account of a stage."""
        stage = StageAccount(name, depth)
        self.stages.append(stage)
        return stage

    def reserve(self, stage: StageAccount) -> int:
        """Blocks until one more item of the stage fits; returns the bytes reserved.

        Raises:
            Cancelled: the run is over.
        """
        while True:
            with self._lock:
                if self._cancelled:
                    raise Cancelled
                if self._fits(stage):
                    self._use(stage.largest)
                    return stage.largest
                waiter = Waiter(perf_counter_ns())
                self._waiting.append((stage, waiter))
            try:
                waiter.wait(self.activity)
            except BaseException:
                with self._lock:
                    if (stage, waiter) in self._waiting:
                        self._waiting.remove((stage, waiter))
                        self.activity.resume()
                    else:
                        self._wake()
                raise
            with self._lock:
                stage.wait_ns += perf_counter_ns() - waiter.since_ns

    def _fits(self, stage: StageAccount) -> bool:
        return self.used + stage.largest <= self.limit - stage.headroom

    def _use(self, nbytes: int) -> None:
        self.used += nbytes
        if self.used > self.peak:
            self.peak = self.used

    def settle(self, stage: StageAccount, reserved: int, old: Buffers, new: Buffers) -> None:
        """A stage has made ``new`` out of ``old``: give the reservation back and count what is there.

        Raises:
            MemoryLimitError: one item alone is larger than the limit.
        """
        with self._lock:
            self.used -= reserved
            added = self._add(new)
            self._remove(old)
            if added > stage.largest:
                if sum(nbytes for _, nbytes in new) > self.limit:
                    raise MemoryLimitError(
                        f"stage {stage.name!r}: one item of {format_bytes(sum(n for _, n in new))} is larger than "
                        f"memory_limit={format_bytes(self.limit)}; raise memory_limit or make smaller items"
                    )
                stage.largest = added
                self._raise_headroom()
            self._wake()

    def _raise_headroom(self) -> None:
        for stage in self.stages:
            below = sum(other.largest for other in self.stages if other.depth < stage.depth)
            stage.headroom = min(below, self.limit)

    def _add(self, buffers: Buffers) -> int:
        added = 0
        references = self._references
        for identity, nbytes in buffers:
            entry = references.get(identity)
            if entry is None:
                references[identity] = [1, nbytes]
                added += nbytes
            else:
                entry[0] += 1
        self._use(added)
        return added

    def _remove(self, buffers: Buffers) -> None:
        references = self._references
        for identity, _ in buffers:
            entry = references.get(identity)
            if entry is None:
                continue
            entry[0] -= 1
            if entry[0] == 0:
                del references[identity]
                self.used -= entry[1]

    def hold(self, buffers: Buffers, times: int = 1) -> None:
        """More chunks refer to these buffers."""
        with self._lock:
            for _ in range(times):
                self._add(buffers)

    def release(self, buffers: Buffers) -> None:
        """A chunk that referred to these buffers is gone."""
        if not buffers:
            return
        with self._lock:
            self._remove(buffers)
            self._wake()

    def cancel_reservation(self, reserved: int) -> None:
        """Nothing was made after all."""
        if reserved:
            with self._lock:
                self.used -= reserved
                self._wake()

    def _wake(self) -> None:
        if not self._waiting:
            return
        self._waiting.sort(key=lambda entry: entry[0].depth)
        room = self.used
        for entry in list(self._waiting):
            stage, waiter = entry
            if room + stage.largest > self.limit - stage.headroom:
                break
            room += stage.largest
            self._waiting.remove(entry)
            waiter.wake(self.activity)

    def waiting(self) -> list[str]:
        """The stages that wait for memory, the one furthest down first."""
        with self._lock:
            return [stage.name for stage, _ in sorted(self._waiting, key=lambda entry: entry[0].depth)]

    def admit_one(self) -> bool:
        """Everything stands still: let the waiter furthest down go on if the limit itself allows it.

        Its ceiling kept room for items downstream that, as nothing moves, are not coming.
        """
        with self._lock:
            for entry in sorted(self._waiting, key=lambda entry: entry[0].depth):
                stage, waiter = entry
                if self.used + stage.largest <= self.limit:
                    stage.headroom = 0
                    self._waiting.remove(entry)
                    waiter.wake(self.activity)
                    return True
            return False

    def cancel(self) -> None:
        """Wake every waiter with ``Cancelled`` and forget all buffers."""
        with self._lock:
            self._cancelled = True
            for _, waiter in self._waiting:
                waiter.wake(self.activity)
            self._waiting.clear()
            self._references.clear()
            self.used = 0
