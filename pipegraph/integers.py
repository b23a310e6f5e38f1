"""Numbers and flags that users give: of any type, NumPy's too. Integers are no bools, and bools no integers."""

from __future__ import annotations

import math
import operator
from numbers import Real

import numpy as np

from pipegraph.errors import DataError, GraphError, shown


def integer(value: object, what: str, least: int = 1, rule: str = "must be an int >= {}") -> int:
    """``value`` as an int; raises GraphError, with ``what`` and the ``rule``, if it is none or below ``least``."""
    try:
        found = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = least - 1
    if found < least:
        raise GraphError(f"{what} {rule.format(least)}, got {shown(value)}")
    return found


def flag(
    value: object, what: str, refusal: type[Exception] = GraphError, rule: str = "True or False"
) -> bool:
    """``value`` as a bool; raises ``refusal``, with ``what`` and the ``rule``, if it is none: a text counts as True."""
    if not isinstance(value, bool | np.bool_):
        raise refusal(f"{what} must be {rule}, got {shown(value)}")
    return bool(value)


def amount(value: object, what: str, least: float = 0, refusal: type[Exception] = DataError) -> int | float:
    """``value``, also a tensor or an array of one number, as an int or a float.

    Raises:
        DataError: (or ``refusal``) it is none, not a number (NaN), or below ``least``; says ``what`` it is.
    """
    found = value
    if hasattr(value, "item"):
        try:
            found = value.item()
        except (TypeError, ValueError, RuntimeError):  # of several numbers
            found = None
    if isinstance(found, Real) and not isinstance(found, int):
        found = float(found)
    if not isinstance(found, int | float) or not found >= least:
        floor = "" if least == -math.inf else f" >= {least}"
        raise refusal(f"{what} must be a number{floor}, got {shown(value)}")
    return found
