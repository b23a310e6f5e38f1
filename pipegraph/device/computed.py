"""What stages behind a copy make of it on its device, for a loop that works on another stream than they."""

from __future__ import annotations

from typing import Any

from pipegraph.device.backend import Backend, Event, Stream
from pipegraph.device.own_moves import tensors_within


class Computed(Event):
    """The end of all work that the stages' stream holds when somebody waits.

    Args:
        stream: of the backend, the current one of the stages' threads, on which they work.
    """

    def __init__(self, backend: Backend, stream: Stream) -> None:
        self._backend = backend
        self._stream = stream

    def wait(self, stream: Stream | None = None) -> None:
        reader = self._backend.current_stream() if stream is None else stream
        if reader != self._stream:
            self._stream.record_event().wait(reader)

    def delivered(self, data: Any) -> None:
        reader = self._backend.current_stream()
        if reader != self._stream:
            self._stream.record_event().wait(reader)
            for tensor in tensors_within(
                data, self._backend.device
            ):  # else the stages would reuse its memory
                self._backend.read_on(tensor, reader)

    def query(self) -> bool:
        return self._stream.record_event().query()

    def synchronize(self) -> None:
        self._stream.record_event().synchronize()
