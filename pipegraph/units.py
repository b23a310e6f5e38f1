"""Sizes as text and as bytes: "500 GB", "64 MiB", 1 << 20; and other things as short text."""

from __future__ import annotations

import math
import re

from pipegraph.errors import GraphError, shown
from pipegraph.integers import integer

NANOSECOND = 1e-9
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", 1):
    _UNITS[_letter] = _UNITS[_letter + "b"] = 1000**_power
    _UNITS[_letter + "ib"] = 1024**_power


def parse_bytes(size: int | float | str, what: str) -> int:
    """Bytes from a number or a text such as ``"500 GB"`` (1000-based) or ``"2 GiB"`` (1024-based).

    Raises:
        GraphError: not a size, or not positive; names ``what``.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNITS:
            raise GraphError(f"{what} must be bytes or a size such as '500 MB' or '2 GiB', got {shown(size)}")
        value = float(match[1]) * _UNITS[match[2].lower()]
    elif isinstance(size, float) and math.isfinite(size):
        value = size
    else:
        value = integer(size, what, 0, "must be bytes or a size such as '500 MB' or '2 GiB'")
    if isinstance(size, float) and not size.is_integer():
        raise GraphError(f"{what} must be whole bytes or a size such as '1.5 GB', got {shown(size)}")
    if value < 1:
        raise GraphError(f"{what} must be at least 1 byte, got {shown(size)}")
    return int(value)


def format_bytes(nbytes: float) -> str:
    """``1234567`` as ``"1.2 MB"``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 999.5 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def counted(count: int, noun: str) -> str:
    """``"1 shard"``, ``"2,000 shards"``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_duration(seconds: float) -> str:
    """``0.00123`` as ``"1.23 ms"``; ``"-"`` where there is none, or less than a clock shows."""
    if seconds < NANOSECOND:
        return "-"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * factor
        if value >= 0.9995 or unit == "us":  # of three digits, 0.9996 is 1
            return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    raise AssertionError


def format_share(share: float) -> str:
    """``0.123`` as ``"12 %"``; below ten per cent with a decimal."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 9.95 or percent < 0.05 else f"{percent:.1f} %"


def format_gain(gain: float) -> str:
    """``0.5`` as ``"+50 %"``; from ten times as fast on as ``"12 times"``."""
    return f"{100 * gain:+.0f} %" if gain < 9 else f"{1 + gain:,.0f} times"


def format_count(number: float) -> str:
    """``1234`` as ``"1,234"``, from a hundred million on in millions."""
    return f"{number:,.0f}" if number < 10**8 else f"{number / 1e6:,.0f} M"


def format_rate(rate: float) -> str:
    """``12.34`` as ``"12.3"``; from a thousand on whole."""
    return f"{rate:,.1f}" if rate < 1000 else f"{rate:,.0f}"


def shorten(text: str, limit: int) -> str:
    """A text in one line, cut to a maximum number of characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
