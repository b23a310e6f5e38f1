"""A batch in parts, one per device: what ``ops.Scatter`` delivers and the replica executor takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pipegraph.device.backend import Event, normalised


class Scattered(Sequence[Any]):
    """A sequence of per-device batches; immutable.

    Args:
        parts: one batch per device, in the order of `devices`. A batch with
            fewer rows than devices has fewer parts: `devices` then has as many entries as `parts`.
        devices: where each part lies.
        ready: per part the event after which it may be read, or None where
            it may be read at once. Who reads part i makes its stream wait first: ``scattered.wait(i)``.
        rows: of each part; None where they are to be found in it.

    Raises:
        ValueError: the three differ in length.
    """

    __slots__ = ("_devices", "_parts", "_ready", "rows")

    def __init__(
        self,
        parts: Iterable[Any],
        devices: Iterable[torch.device | str | int],
        ready: Iterable[Event | None] | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        self.rows = None if rows is None else tuple(rows)
        self._parts = tuple(parts)
        self._devices = tuple(normalised(device) for device in devices)
        self._ready = (None,) * len(self._parts) if ready is None else tuple(ready)
        if not len(self._parts) == len(self._devices) == len(self._ready):
            raise ValueError(
                f"Scattered: one device and one event per part, got {len(self._parts)} parts, "
                f"{len(self._devices)} devices, {len(self._ready)} events"
            )

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each part."""
        return self._devices

    @property
    def ready(self) -> tuple[Event | None, ...]:
        """The event after which each part may be read, None where no wait is needed."""
        return self._ready

    def wait(self, part: int) -> Any:
        """Make the calling thread's current stream wait for a part, and return the part."""
        event = self._ready[part]
        if event is not None:
            event.wait()
        return self._parts[part]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            rows = None if self.rows is None else self.rows[index]
            return Scattered(self._parts[index], self._devices[index], self._ready[index], rows)
        return self._parts[index]

    def __repr__(self) -> str:
        return f"<Scattered: {len(self)} parts on {', '.join(map(str, self._devices))}>"
