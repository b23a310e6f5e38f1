"""What CUDA alone has (ROCm too): NCCL, events that block. The only module that mentions ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.cuda.nccl

from pipegraph import concurrency
from pipegraph.device.accelerator import AcceleratorBackend, raw_of
from pipegraph.device.backend import Stream

_ONE_AT_A_TIME = concurrency.Lock()
"""Held while work is given to NCCL: torch keeps one set of communicators for all threads, and does not guard it."""


class CudaBackend(AcceleratorBackend):
    """A GPU. A thread that waits for one of its events leaves its core to others, and NCCL sums over several."""

    def raw_stream(self) -> torch.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def __init__(self, device: torch.device | str | int) -> None:
        super().__init__(device)
        self._seen: dict[int, torch.Stream] = {}

    def raw_current(self) -> torch.Stream:
        # torch.cuda.current_stream makes an object each time, which is most of its cost.
        known = torch._C._cuda_getCurrentStream(self.index)
        if (stream := self._seen.get(known[0])) is None:
            stream = self._seen[known[0]] = torch.cuda.current_stream(self.device)
        return stream

    def raw_event(self) -> torch.Event:
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    sums_together = hasattr(torch._C, "_nccl_all_reduce")

    def sum_together(self, buffers: Sequence[torch.Tensor], streams: Sequence[Stream]) -> None:
        given = [_real(buffer) for buffer in buffers]
        raw: Any = [raw_of(stream) for stream in streams]
        with _ONE_AT_A_TIME:
            torch.cuda.nccl.all_reduce(given, streams=raw)  # type: ignore[no-untyped-call]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """NCCL knows no complex numbers; their sum is that of their two parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
