"""The memory account of one loader: counts live buffers.

A buffer counts once, from the moment a stage has made it until the last chunk that refers to it has been delivered or
dropped. Nobody waits for memory: queues are bounded by their shares of the limit, and what is being worked on comes on
top.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipegraph import concurrency

Buffers = tuple[tuple[int, int], ...]


class Account:
    """See the module docstring. Thread-safe.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._lock = concurrency.Lock()
        self._references: dict[int, list[int]] = {}  # by identity: chunks that refer to it, bytes
        self._cancelled = False

    def settle(self, old: Buffers, new: Buffers) -> None:
        """A stage has made ``new`` from ``old``."""
        with self._lock:
            self._add(new)
            self._remove(old)

    def _use(self, nbytes: int) -> None:
        self.used += nbytes
        if self.used > self.peak:
            self.peak = self.used

    def _add(self, buffers: Buffers) -> None:
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

    def exchange(self, old: Buffers, new: Sequence[Buffers]) -> None:
        """One chunk was split into several: replace its references by theirs."""
        with self._lock:
            self._remove(old)
            for each in new:
                self._add(each)

    def release(self, buffers: Buffers) -> None:
        """A chunk that refers to these buffers was dropped."""
        if not buffers:
            return
        with self._lock:
            self._remove(buffers)

    def keep(self, nbytes: int) -> None:
        """Count bytes kept outside of chunks, such as states of iterators; negative when they are released."""
        if nbytes:
            with self._lock:
                if not self._cancelled:
                    self._use(nbytes)

    def cancel(self) -> None:
        """Forget all buffers."""
        with self._lock:
            self._cancelled = True
            self._references.clear()
            self.used = 0
