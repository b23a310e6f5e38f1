"""The CPU as a device: who gives it work does the work, so everything built on slots runs without an accelerator."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from pipegraph.device.backend import Backend, DeviceFacts, DeviceQueue, Event, PastEvent, Slot, Stream


class CpuBackend(Backend):
    """Memory and random numbers of the CPU. All work on it is done when it is given; its marks are reached at once."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._host = DeviceQueue(Slot(self.device), "host", self)

    def new_stream(self, slot: Slot, name: str) -> Stream:
        return DeviceQueue(slot, name, self)

    def event(self) -> Event:
        return PastEvent()

    def current_stream(self) -> Stream:
        return self._host

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        with torch.no_grad():
            dst.copy_(src)

    def read_on(self, buffer: torch.Tensor, stream: Stream) -> None:
        return None

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)

    def facts(self) -> DeviceFacts:
        # All slots share the one CPU, so only equality matters here.
        return DeviceFacts(memory=1, multiprocessors=1)

    def finish(self) -> None:
        return None
