"""Shows stages as ranges in torch.profiler and NVTX: the methods of one worker's operator, wrapped.

Only operators of a recording with ``ranges=True`` are wrapped, so all others pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch

from pipegraph.device import cuda
from pipegraph.engine.tracing import Tracer

WORKING = (
    *("process", "work_into", "choose", "take_bundle", "flush"),
    *("begin_batch", "do_row", "end_batch", "read", "read_into", "gather"),
)
"""Methods in which operators and random-access sources work."""

READING = ("items", "iterate")
"""Methods of sources whose iterators work, item by item."""


def show_ranges(operator: Any, stage: str, tracer: Tracer) -> None:
    """From now on the operator's work is a range named after its stage while ``tracer.ranges`` holds.

    Args:
        operator: one worker's opened copy; its class is left as it is.
    """
    nvtx = cuda.nvtx_range if cuda.is_available() else nullcontext
    inside = False  # a method that calls another one of the same operator is one range

    @contextmanager
    def shown() -> Iterator[None]:
        nonlocal inside
        if inside or not tracer.ranges:
            yield
            return
        inside = True
        try:
            with torch.profiler.record_function(stage), nvtx(stage):
                yield
        finally:
            inside = False

    def working(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def work(*args: Any, **kwargs: Any) -> Any:
            with shown():
                return method(*args, **kwargs)

        return work

    def reading(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def read(*args: Any, **kwargs: Any) -> Any:
            items = method(*args, **kwargs)
            return None if items is None else each(iter(items))

        return read

    def each(items: Iterator[Any]) -> Iterator[Any]:
        try:
            while True:
                with shown():
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item
        finally:
            if (close := getattr(items, "close", None)) is not None:
                close()

    for names, wrapped in ((WORKING, working), (READING, reading)):
        for name in names:
            method = getattr(operator, name, None)
            if callable(method):
                object.__setattr__(operator, name, wrapped(method))
