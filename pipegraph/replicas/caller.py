"""Carries the caller's thread-local state to the replicas' threads."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from pipegraph.errors import ReplicaError

T = TypeVar("T")


@dataclass(frozen=True)
class CallerState:
    """Grad and inference mode, autocast, default device and context variables of a thread.

    They are *entered and left* in the other thread, never set: autocast's
    weight cache is process-wide and is cleared when the outermost autocast of a thread is left.
    """

    context: contextvars.Context
    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device | None

    @classmethod
    def capture(cls, device_types: frozenset[str]) -> CallerState:
        """Of the calling thread; autocast for the CPU and the given device types.

        Raises:
            ReplicaError: a dispatch mode, a function mode or saved-tensor hooks are active, which
                other threads would not see.
        """
        modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        strange = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
        if torch._C._len_torch_dispatch_stack() or strange:
            raise ReplicaError(
                "replicas run in other threads, where the active torch mode "
                f"({', '.join(strange) or 'a dispatch mode'}) would be lost: call the executor outside it"
            )
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise ReplicaError(
                "replicas run in other threads, where the active saved-tensor hooks would be lost: enter "
                "them inside the module's forward"
            )
        return cls(
            context=contextvars.copy_context(),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in sorted(device_types | {"cpu"})
                if _autocasts(kind)
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=next(
                (mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), None
            ),
        )

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` under this state, in this thread. Each call has a copy of the context variables."""
        return self.context.copy().run(self._run, work)

    def _run(self, work: Callable[[], T]) -> T:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            # Inside inference mode, which turns gradients off by itself.
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            for kind, dtype in self.autocast:
                manager: Any = torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache)
                stack.enter_context(manager)
            return work()


def _autocasts(kind: str) -> bool:
    """Whether autocast is on for a type of device; some know none."""
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:
        return False


@contextmanager
def no_autocast() -> Iterator[None]:
    """The calling thread without the autocast that it may be under."""
    built = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for kind in ["cpu"] if built is None else ["cpu", built.type]:
            if _autocasts(kind):
                manager: Any = torch.autocast(kind, enabled=False)
                stack.enter_context(manager)
        yield
