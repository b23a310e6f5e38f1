"""Integers that users give: of any type, NumPy's too, but no bools."""

from __future__ import annotations

import operator

from pipegraph.errors import GraphError


def integer(value: object, what: str, least: int = 1, rule: str = "must be an int >= {}") -> int:
    """``value`` as an int.

    Raises:
        GraphError: it is none, or below ``least``; says ``what`` it is and the ``rule``.
    """
    try:
        found = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = least - 1
    if found < least:
        raise GraphError(f"{what} {rule.format(least)}, got {value!r}")
    return found
