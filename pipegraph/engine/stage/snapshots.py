"""Snapshots of a source's iterator, kept while it is read, so that a restart need not read the epoch from its start."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from pipegraph.engine.stage.kept import decode, encode_state
from pipegraph.tree import buffers

MAX_SNAPSHOTS = 256
"""Maximum number of snapshots; beyond it, every second one is dropped."""

SHARE = 8
"""Snapshots may take 1/8 of the memory limit; one that is needed and the newest are always kept."""

Entries = tuple[tuple[int, int, object, int], ...]
"""Snapshots in the order in which they were taken: epoch, step, snapshot, bytes."""


class Snapshots:
    """The snapshots of one source, as JSON. Written by the source's worker; read at any moment by threads that take a
    state, or by a signal handler that interrupted the worker. So there is no lock, but one tuple, replaced as a whole.

    Args:
        stage: the source's name.
        limit: bytes of the memory limit.
        charge: called with the change of the bytes kept.

    Attributes:
        first: ``(step, snapshot)`` that the run itself resumes from, or None.
    """

    def __init__(self, stage: str, limit: int, charge: Callable[[int], None]) -> None:
        self._stage = stage
        self._limit = limit
        self._charge = charge
        self.first: tuple[int, object] | None = None
        self.needed: Callable[[], tuple[int, int] | None] = lambda: None  # (epoch, step) of a restart
        self._taken: Entries = ()

    def begin(self, epoch: int, first: tuple[int, object] | None) -> None:
        """The run resumes from ``first`` in ``epoch``."""
        self.first = first
        if first is not None:
            self._taken = (*self._taken, (epoch, *first, 0))

    def begins(self, epoch: int, first_epoch: int) -> bool:
        """Whether the epoch's beginning is not known from the state that the run resumes from."""
        return epoch > first_epoch or self.first is None

    def restore(self, source: Any, epoch: int, first_epoch: int) -> None:
        """Restore the source from the run's snapshot, if the run begins in this epoch."""
        if epoch == first_epoch and self.first is not None:
            step, snapshot = self.first
            source.restore(step, decode(snapshot))

    def add(self, epoch: int, step: int, snapshot: object) -> None:
        """Add the iterator's snapshot from before item ``step`` of ``epoch``.

        Raises:
            GraphError: it cannot be encoded as JSON.
        """
        encoded = encode_state(snapshot, self._stage)
        before = self._taken
        same = bool(before) and before[-1][:2] == (epoch, step)  # it is known better now
        taken = (*(before[:-1] if same else before), (epoch, step, encoded, snapshot_bytes(encoded)))
        needed = self.needed()
        if needed is not None:
            # Keep one more than needed: another thread may be taking a state of the previous chunk.
            gone = max(0, sum(1 for each in taken if each[:2] <= needed) - 2)
            taken = taken[gone:]
        while len(taken) > MAX_SNAPSHOTS or (len(taken) > 2 and _bytes(taken) > self._limit // SHARE):
            thinner = (*_thinned(taken[:-1]), taken[-1])
            if len(thinner) == len(taken):
                break
            taken = thinner
        self._charge(_bytes(taken) - _bytes(before))
        self._taken = taken

    @property
    def taken(self) -> bool:
        """Whether there is a snapshot."""
        return bool(self._taken)

    def newest(self, epoch: int, step: int) -> tuple[int, object] | None:
        """``(step, snapshot)`` of the latest from which ``step`` of ``epoch`` can be reached; else None."""
        for at, taken, snapshot, _ in reversed(self._taken):
            if at == epoch and taken <= step:
                return taken, snapshot
        return None


def _thinned(taken: Entries) -> Entries:
    """Every second one, and the beginnings of epochs."""
    beginnings = [each for each in taken if each[1] == 0]
    return tuple(sorted([*beginnings, *[each for each in taken if each[1]][::2]], key=itemgetter(0, 1)))


def _bytes(taken: Entries) -> int:
    return sum(nbytes for *_, nbytes in taken)


def snapshot_bytes(snapshot: object) -> int:
    """Bytes of the arrays, texts and long containers in a snapshot."""
    return sum(nbytes for _, nbytes in buffers(snapshot))
