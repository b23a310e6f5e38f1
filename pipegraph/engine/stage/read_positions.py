"""The positions of a source's steps as they were read, where the source cannot tell them from the steps."""

from __future__ import annotations

from collections.abc import Sequence

from pipegraph import concurrency


class ReadPositions:
    """Kept until a state forgets the samples. Written by the source's worker, taken by the consumer's thread."""

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._epochs: dict[int, dict[int, int]] = {}  # by epoch and step

    def note(self, epoch: int, steps: range, positions: Sequence[int], begun: float) -> None:
        """Keep the positions of these steps; those of epochs before ``begun``, whose passes are over, are dropped."""
        with self._lock:
            for over in [each for each in self._epochs if each < begun]:
                del self._epochs[over]
            self._epochs.setdefault(epoch, {}).update(zip(steps, positions, strict=True))

    def take(self, epoch: int, steps: range) -> list[int]:
        """The positions of those of these steps that are kept; they are kept no longer."""
        with self._lock:
            kept = self._epochs.get(epoch, {})
            return [kept.pop(step) for step in steps if step in kept]
