"""Names of packages that are imported on first use, and imports that cause no collection of garbage.

What an import makes stays, so there is nothing to collect; yet its objects count as new ones. Behind ``import torch``
they are soon enough for a full collection, which walks all of torch's objects: 0.1 s before the first batch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

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


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The functions ``__getattr__`` and ``__dir__`` of a package (PEP 562), and all the names.

    Args:
        package: the package's ``__name__``.
        modules: for each module of the package the names that come from it; ``""`` has modules themselves.

    Threads: several may ask for one name at a time; Python's import locks keep the module single.
    """
    found_in = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in found_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = found_in[name]
        with importing():
            value = import_module(f"{package}.{module or name}")
        if module:
            value = getattr(value, name)
        setattr(sys.modules[package], name, value)  # the next use does not come here
        return value

    def names() -> list[str]:
        return sorted({*(name for name in vars(sys.modules[package]) if name.startswith("__")), *found_in})

    return get, names, sorted(found_in)
