"""Slots, streams, events and memory of devices. Mechanism: knows no graph and no model.

Open a backend with :func:`backend_for`; its opener must close it.
"""

from __future__ import annotations

import torch

from pipegraph.device.backend import (
    Backend as Backend,
    DeviceFacts as DeviceFacts,
    Event as Event,
    MemoryKind as MemoryKind,
    Slot as Slot,
    Stream as Stream,
    normalised as normalised,
    slots_on as slots_on,
)
from pipegraph.device.copy import copy_tree as copy_tree, sent as sent
from pipegraph.device.cpu import CpuBackend as CpuBackend
from pipegraph.device.scattered import Scattered as Scattered
from pipegraph.errors import DeviceError


def every_device() -> list[torch.device]:
    """All GPUs, or the CPU where there is none."""
    from pipegraph.device import cuda

    return cuda.devices() or [torch.device("cpu")]


def bind_thread(device: torch.device) -> None:
    """Make a GPU the calling thread's current device, for a thread that works for it alone."""
    if device.type == "cuda":
        from pipegraph.device import cuda

        cuda.bind_thread(device)


def backend_for(device: torch.device | str | int) -> Backend:
    """A new backend for `device`, to be closed by the caller (it is a context manager).

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, a CUDA ordinal.

    Raises:
        DeviceError: no backend for this kind of device, or no such device here.
    """
    plain = normalised(device)
    if plain.type == "cpu":
        return CpuBackend()
    if plain.type == "cuda":
        from pipegraph.device.cuda import CudaBackend

        return CudaBackend(plain)
    raise DeviceError(f"no device backend for {plain.type!r}: 'cpu' and 'cuda' have one")
