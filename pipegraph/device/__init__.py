"""Slots, streams, events and memory of devices. Mechanism: knows no graph and no model.

Open a backend with :func:`backend_for`; its opener must close it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegraph.lazy_names import lazy_names

if TYPE_CHECKING:
    from pipegraph.device.accelerator import (
        AcceleratorBackend as AcceleratorBackend,
        Offers as Offers,
        offers as offers,
        unpinned as unpinned,
    )
    from pipegraph.device.backend import (
        Backend as Backend,
        CpuBackend as CpuBackend,
        Event as Event,
        Slot as Slot,
        Stream as Stream,
        normalised as normalised,
        slots_on as slots_on,
    )
    from pipegraph.device.copy import copy_tree as copy_tree, sent as sent
    from pipegraph.device.opening import (
        backend_for as backend_for,
        bind_thread as bind_thread,
        every_device as every_device,
        profiler_ranges as profiler_ranges,
    )
    from pipegraph.device.present import (
        current_device as current_device,
        devices as devices,
        here as here,
        is_initialized as is_initialized,
    )
    from pipegraph.device.scattered import Scattered as Scattered

# Imported at first use: worker processes need to know whether there is a device, and no more.
_MODULES = {
    "accelerator": "AcceleratorBackend Offers offers unpinned",
    "backend": "Backend CpuBackend Event Slot Stream normalised slots_on",
    "copy": "copy_tree sent",
    "opening": "backend_for bind_thread every_device profiler_ranges",
    "present": "current_device devices here is_initialized",
    "scattered": "Scattered",
}
__getattr__, __dir__, _LATER = lazy_names(__name__, _MODULES)
