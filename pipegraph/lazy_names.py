"""Names of a package that are imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from pipegraph.importing import importing


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
        return sorted({*vars(sys.modules[package]), *found_in})

    return get, names, sorted(found_in)
