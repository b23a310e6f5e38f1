"""States of a source's iterator, for a restart that need not read the epoch again from its start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

MOST = 256
"""Snapshots kept; when there are more, every second of the older half goes."""


class Snapshots:
    """Written by the source's worker; read at any moment by whoever takes a state, also by a signal handler that
    has interrupted the worker. So there is no lock: what is kept is one tuple, replaced as a whole.

    Attributes:
        first: ``(step, snapshot)`` that the run itself goes on from, or None.
    """

    def __init__(self) -> None:
        self.first: tuple[int, Any] | None = None
        self.needed: Callable[[], tuple[int, int] | None] = lambda: (
            None
        )  # (epoch, step) of a restart from now
        self._taken: tuple[tuple[int, int, Any], ...] = ()

    def begin(self, epoch: int, first: tuple[int, Any] | None) -> None:
        """The run goes on from ``first`` in ``epoch``."""
        self.first = first
        if first is not None:
            self._taken = (*self._taken, (epoch, *first))

    def add(self, epoch: int, step: int, snapshot: Any) -> None:
        """In ``epoch``, with ``step`` as the next item, the iterator stood like this."""
        taken = (*self._taken, (epoch, step, copy.deepcopy(snapshot)))
        needed = self.needed()
        if needed is not None:
            # One more than needed: somebody may be taking a state of the chunk before.
            behind = sum(1 for each in taken if each[:2] <= needed)
            taken = taken[max(0, behind - 2) :]
        if len(taken) > MOST:
            half = MOST // 2
            taken = taken[:half:2] + taken[half:]
        self._taken = taken

    @property
    def taken(self) -> bool:
        """Whether there is one."""
        return bool(self._taken)

    def newest(self, epoch: int, step: int) -> tuple[int, Any] | None:
        """The one to go on from to ``step`` of ``epoch``."""
        for at, taken, snapshot in reversed(self._taken):
            if at == epoch and taken <= step:
                return taken, snapshot
        return None
