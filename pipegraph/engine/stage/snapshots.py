"""Snapshots of a source's iterator, so that a restart need not read the epoch again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipegraph.contracts import Source
from pipegraph.engine.stage.kept import decode, encode_state
from pipegraph.tree import buffers

MAX_SNAPSHOTS = 256
"""Snapshots kept; when there are more, every second of the older half goes."""

SHARE = 8
"""Of the memory limit, the part that snapshots may take (one that is needed and the newest are kept in any case)."""


class Snapshots:
    """Written by the source's worker; read at any moment by whoever takes a state, also by a signal handler that
    has interrupted the worker. So there is no lock: what is kept is one tuple, replaced as a whole.

    They are kept as JSON.

    Args:
        stage: the source's name.
        limit: bytes of the memory limit.
        charge: called with how many bytes more (or less) are kept.

    Attributes:
        first: ``(step, snapshot)`` that the run itself resumes from, or None.
    """

    def __init__(self, stage: str, limit: int = 0, charge: Callable[[int], None] | None = None) -> None:
        self._stage = stage
        self._limit = limit
        self._charge = charge
        self._sizes: dict[tuple[int, int], int] = {}  # by epoch and step; the worker's own
        self.first: tuple[int, Any] | None = None
        self.needed: Callable[[], tuple[int, int] | None] = lambda: (
            None
        )  # (epoch, step) of a restart from now
        self._taken: tuple[tuple[int, int, Any], ...] = ()

    def begin(self, epoch: int, first: tuple[int, Any] | None) -> None:
        """The run resumes from ``first`` in ``epoch``."""
        self.first = first
        if first is not None:
            self._taken = (*self._taken, (epoch, *first))

    def restore(self, source: Source, epoch: int, first_epoch: int) -> None:
        """Let the source resume where the run does, if it begins there."""
        if epoch == first_epoch and self.first is not None:
            step, snapshot = self.first
            source.restore(step, decode(snapshot))

    def add(self, epoch: int, step: int, snapshot: Any) -> None:
        """In ``epoch``, with ``step`` as the next item, the iterator stood like this.

        Raises:
            GraphError: it has no form in JSON.
        """
        taken = (*self._taken, (epoch, step, encode_state(snapshot, self._stage)))
        needed = self.needed()
        if needed is not None:
            # One more than needed: somebody may be taking a state of the chunk before.
            behind = sum(1 for each in taken if each[:2] <= needed)
            taken = taken[max(0, behind - 2) :]
        if len(taken) > MAX_SNAPSHOTS:
            half = MAX_SNAPSHOTS // 2
            taken = taken[:half:2] + taken[half:]
        if self._charge is not None:
            taken = self._charged(taken, self._charge)
        self._taken = taken

    def _charged(
        self, taken: tuple[tuple[int, int, Any], ...], charge: Callable[[int], None]
    ) -> tuple[tuple[int, int, Any], ...]:
        before, sizes = sum(self._sizes.values()), self._sizes
        epoch, step, snapshot = taken[-1]
        sizes[epoch, step] = snapshot_bytes(snapshot)
        while len(taken) > 2 and sum(sizes.get(each[:2], 0) for each in taken) > self._limit // SHARE:
            taken = (*taken[:-1:2], taken[-1])
        self._sizes = {each[:2]: sizes.get(each[:2], 0) for each in taken}
        charge(sum(self._sizes.values()) - before)
        return taken

    @property
    def taken(self) -> bool:
        """Whether there is one."""
        return bool(self._taken)

    def newest(self, epoch: int, step: int) -> tuple[int, Any] | None:
        """The one to resume from towards ``step`` of ``epoch``."""
        for at, taken, snapshot in reversed(self._taken):
            if at == epoch and taken <= step:
                return taken, snapshot
        return None


def snapshot_bytes(snapshot: Any) -> int:
    """The bytes of the arrays, texts and long containers in a snapshot."""
    return sum(nbytes for _, nbytes in buffers(snapshot))
