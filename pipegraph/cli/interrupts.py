"""Ctrl-C that is never lost.

Python raises ``KeyboardInterrupt`` wherever the main thread happens to be. Inside a ``__del__`` or a weak reference's
callback, which may run whenever a batch is released, the interpreter prints it and drops it
("Exception ignored in ..."). Here it is remembered instead, and raised at the job's next step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_dropped = False


@contextmanager
def kept() -> Iterator[None]:
    """Remember interrupts that the interpreter would drop, for :func:`check`."""
    global _dropped
    _dropped = False
    before = sys.unraisablehook

    def remember(unraisable: Any) -> None:
        global _dropped
        if unraisable.exc_type is KeyboardInterrupt:
            _dropped = True
        else:
            before(unraisable)

    sys.unraisablehook = remember
    try:
        yield
    finally:
        sys.unraisablehook = before


def check() -> None:
    """Raises KeyboardInterrupt if one was dropped since the last look."""
    global _dropped
    if _dropped:
        _dropped = False
        raise KeyboardInterrupt
