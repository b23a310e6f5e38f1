"""The line that installs what is missing: the requirements themselves, which work wherever pipegraph came from."""

from __future__ import annotations

import re
from importlib import metadata


def install_line(extra: str, distribution: str | None = None) -> str:
    """``pip install`` with what an extra stands for, or with one distribution of it.

    Where pipegraph runs from its sources, and nothing was installed that could be asked, it is the clone's own line.
    """
    try:
        stated = metadata.requires("pipegraph-torch") or []
    except metadata.PackageNotFoundError:
        stated = []
    parts = (each.replace("'", '"').partition(";") for each in stated)
    wanted = [requirement.strip() for requirement, _, marker in parts if f'extra == "{extra}"' in marker]
    if distribution is not None:
        wanted = [each for each in wanted if re.match(r"[\w.-]+", each)[0].lower() == distribution.lower()]  # type: ignore[index]
    return "pip install " + (" ".join(f'"{each}"' for each in wanted) or f'-e ".[{extra}]"')
