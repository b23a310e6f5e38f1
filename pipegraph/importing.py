"""Imports during which, and because of which, no garbage is collected.

What an import makes stays, so there is nothing to collect; yet its objects count as new ones. Behind ``import torch``
they are soon enough for a full collection, which walks all of torch's objects: 0.1 s before the first batch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_BY_PYTHON = 1000
"""CPython 3.12 freezes some 400 objects of its own when it starts; who calls ``gc.freeze()`` freezes many more."""


@contextmanager
def importing() -> Iterator[None]:
    """A context in which modules are imported. Does nothing where the collector is off, as inside another one."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        settle()
        gc.enable()


def settle() -> None:
    """Count every object as an old one, as full collections leave them; none is visited.

    Not where the user has frozen objects, which would be unfrozen, nor without the GIL, where there are no generations
    and both calls visit every object.
    """
    if gc.get_freeze_count() < _FROZEN_BY_PYTHON and getattr(sys, "_is_gil_enabled", lambda: True)():
        gc.freeze()
        gc.unfreeze()
