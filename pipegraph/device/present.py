"""Which accelerators this machine has, and whether this process may be using one. Imports nothing but torch."""

from __future__ import annotations

import torch


def here() -> torch.device | None:
    """The accelerator of this machine, without an index; None where there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def devices() -> list[torch.device]:
    """All accelerators of this machine that this process may use."""
    found = here()
    return (
        []
        if found is None
        else [torch.device(found.type, n) for n in range(torch.accelerator.device_count())]
    )


def current_device() -> torch.device | None:
    """The calling thread's own accelerator; None where there is none.

    Asking for it would begin to use the accelerator, and a process that uses one cannot fork. Where nobody has begun,
    nobody has chosen another than the first.
    """
    found = here()
    if found is None or not is_initialized():
        return None if found is None else torch.device(found.type, 0)
    return torch.device(found.type, torch.accelerator.current_device_index())


def is_initialized() -> bool:
    """Whether this process may use an accelerator already, so that it must not fork. Touches no driver."""
    built = torch.accelerator.current_accelerator()
    return built is not None and bool(
        getattr(torch.get_device_module(built), "is_initialized", lambda: True)()
    )
