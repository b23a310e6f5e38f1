"""A device of torch in host memory, named ``simulated``, with which the tests run the code of accelerators.

It has four indices, streams and events, pinned memory and a caching allocator. Every operator of the CPU runs on it, as
a piece of work of a stream: at the latest lawful moment, which is when somebody waits for it, or in a random lawful
order. What is freed is poisoned, and used again as early as it may be. So a missing wait is a wrong number, and
`simulated_device.races` finds it in the trace as well.

It is there only inside ``with in_use()``, for the fixture `accelerator`: other tests see a machine without one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch

from simulated_device import build

NAME = "simulated"
Schedule = Literal["latest", "random", "eager", "threads"]


def why_not() -> str | None:
    """Why it cannot be used here; None where it can."""
    if torch.accelerator.is_available() and not is_registered():
        return f"this machine has a real accelerator: {torch.accelerator.current_accelerator()}"
    if build.compiler() is None:
        return "the simulated device needs a C++ compiler (g++, or the one that CXX names)"
    return None


def is_registered() -> bool:
    return f"torch.{NAME}" in sys.modules


@cache
def native() -> Any:
    """The compiled device, registered with torch: once per process, for torch knows no way back, and before any backward."""
    torch.utils.rename_privateuse1_backend(NAME)
    compiled = build.native()
    torch._register_device_module(NAME, _device_module(compiled))
    torch.utils.generate_methods_for_privateuse1_backend()
    # Autograd counts the devices once, at the first backward of a process.
    compiled.set_available(True)
    torch.ones(1, requires_grad=True).sum().backward()
    compiled.set_available(False)
    return compiled


def _device_module(compiled: ModuleType) -> ModuleType:
    """What ``torch.get_device_module`` returns."""
    generators = tuple(compiled.default_generator(index) for index in range(compiled.DEVICES))

    def generator(device: Any = None) -> torch.Generator:
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        return generators[torch.accelerator.current_device_index() if index is None else index]

    def manual_seed_all(seed: int) -> None:
        for each in generators:
            each.manual_seed(seed)

    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = compiled.is_available
    module.device_count = compiled.device_count
    module.current_device = torch.accelerator.current_device_index
    module.is_initialized = compiled.is_available
    module._is_in_bad_fork = lambda: False
    module.default_generators = generators
    module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device=None: generator(device).get_state()
    module.set_rng_state = lambda state, device=None: generator(device).set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


@contextmanager
def in_use(schedule: Schedule = "latest", seed: int = 0, **offered: Any) -> Iterator[torch.device]:
    """The device, as torch's accelerator, until the end of the block.

    Args:
        schedule: work runs when somebody waits for it (``"latest"``), in a lawful order drawn from ``seed``
            (``"random"``), as it is given (``"eager"``), or as soon as it may, in a thread per stream (``"threads"``).
        offered: what it offers, where that is less, or other, than all: see `offer`.
    """
    compiled = native()
    compiled.schedule(schedule, seed)
    offer(**offered)
    compiled.set_available(True)
    try:
        yield torch.device(NAME, 0)
    finally:
        compiled.schedule("latest", 0)  # threads end
        compiled.finish_all_work()
        compiled.listen(None)
        compiled.set_available(False)
        offer()


def offer(**offered: Any) -> None:
    """What the device offers from now on: all, but for these fields of ``Offered`` in schedule.h."""
    what = native().Offered()
    for name, value in offered.items():
        setattr(what, name, value)
    native().offer(what)
