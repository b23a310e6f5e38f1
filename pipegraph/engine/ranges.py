"""Shows stages as ranges in torch.profiler and NVTX, by wrapping the methods of a worker's operator.

Only a recording with ``ranges=True`` wraps operators, so all others pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from pipegraph.device.accelerator import profiler_ranges
from pipegraph.engine.tracing import Tracer

WORKING = (
    *("process", "work_into", "choose", "take_bundle", "flush"),
    *("begin_batch", "do_rows", "do_row", "end_batch", "read", "read_into", "gather"),
)
"""Methods in which operators and random-access sources do their work."""

READING = ("items", "iterate")
"""Methods of sources that return an iterator, which does the work item by item."""


def show_ranges(operator: object, stage: str, tracer: Tracer) -> None:
    """Wrap an operator so that its work shows as a range named after its stage while ``tracer.ranges`` is set.

    Args:
        operator: one worker's opened copy; its class is not changed.
    """
    shown_by_vendor = profiler_ranges()
    inside = False  # nested calls of one operator's methods show as one range

    @contextmanager
    def shown() -> Iterator[None]:
        nonlocal inside
        if inside or not tracer.ranges:
            yield
            return
        inside = True
        try:
            with torch.profiler.record_function(stage), shown_by_vendor(stage):
                yield
        finally:
            inside = False

    def working(method: Callable[..., object]) -> Callable[..., object]:
        @wraps(method)
        def work(*args: object, **kwargs: object) -> object:
            with shown():
                return method(*args, **kwargs)

        return work

    def reading(method: Callable[..., Any]) -> Callable[..., object]:
        @wraps(method)
        def read(*args: object, **kwargs: object) -> object:
            items = method(*args, **kwargs)
            return None if items is None else each(iter(items))

        return read

    def each(items: Iterator[object]) -> Iterator[object]:
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
