"""Opens the backend of a device, and makes a device the calling thread's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pipegraph.device.accelerator import AcceleratorBackend
from pipegraph.device.backend import Backend, CpuBackend, devices, here, normalised


def every_device() -> list[torch.device]:
    """All devices of the accelerator, or the CPU where there is none."""
    return devices() or [torch.device("cpu")]


def bind_thread(device: torch.device) -> None:
    """Make a device the calling thread's current one, for a thread that works for it alone."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if device.type == "cuda":  # else cuBLAS finds no context in a new thread, and warns
        torch.accelerator.current_stream(device).query()


def profiler_ranges() -> Callable[[str], AbstractContextManager[Any]]:
    """Makes named ranges of the calling thread for the profiler of the accelerator's vendor, where it has one."""
    found = here()
    if found is None or found.type != "cuda":
        return nullcontext
    from pipegraph.device.cuda import nvtx_range

    return nvtx_range


def backend_for(device: torch.device | str | int) -> Backend:
    """A new backend for `device`, to be closed by the caller (it is a context manager).

    Args:
        device: ``"cpu"``, ``"accelerator"``, ``"cuda:1"``, an accelerator's ordinal.

    Raises:
        DeviceError: no such device here.
    """
    plain = normalised(device)
    if plain.type == "cpu":
        return CpuBackend()
    if plain.type == "cuda":
        from pipegraph.device.cuda import CudaBackend

        return CudaBackend(plain)
    return AcceleratorBackend(plain)
