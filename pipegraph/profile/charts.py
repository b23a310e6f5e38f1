"""The geometry of the report's charts. Pure: numbers in, points of an SVG out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

from pipegraph.units import format_duration

WIDTH, HEIGHT = 320, 100
"""Of the area that lines are drawn in."""


@dataclass(frozen=True)
class Chart:
    """A line over time.

    Attributes:
        points: of an SVG ``polyline`` in an area of :data:`WIDTH` by :data:`HEIGHT`.
        area: the same, closed along the bottom.
        ticks: ``(y, label)`` of the horizontal lines.
        end: the time at the right edge, as text.
        summary: the chart in words.
    """

    title: str
    unit: str
    points: str
    area: str
    ticks: tuple[tuple[float, str], ...]
    end: str
    summary: str


def line_chart(
    title: str, unit: str, times_s: Sequence[float], values: Sequence[float], maximum: float | None = None
) -> Chart:
    """A chart of one value over time, from 0 up to ``most`` or what there is."""
    top = _round_up(max([*values, maximum or 0.0, 1e-9]))
    end = max(times_s[-1], 1e-9)
    points = [
        (WIDTH * time / end, HEIGHT * (1 - value / top)) for time, value in zip(times_s, values, strict=True)
    ]
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    mean = sum(values) / len(values)
    return Chart(
        title=title,
        unit=unit,
        points=drawn,
        area=f"{points[0][0]:.1f},{HEIGHT} {drawn} {points[-1][0]:.1f},{HEIGHT}",
        ticks=tuple((HEIGHT * (1 - part), _short(top * part)) for part in (0.0, 0.5, 1.0)),
        end=_time(end),
        summary=f"{title}: on average {_short(mean)} {unit}, least {_short(min(values))}, most {_short(max(values))}",
    )


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram: its range, how many fell into it, that as a share 0..1, and the bar's length 0..1."""

    range: str
    count: int
    share: float
    length: float


EDGES_S = tuple(base * 10.0**power for power in range(-5, 2) for base in (1, 2, 5))
"""Of the histogram's bars: 10 us to 50 s, three to a decade; the first and the last are open."""


def histogram(bins: Sequence[tuple[float, int]]) -> list[Bar]:
    """Bars for ``(seconds, how many)``; their length is the square root of their share, so that rare ones show."""
    counts = [0] * (len(EDGES_S) + 1)
    for seconds, count in bins:
        counts[sum(seconds >= edge for edge in EDGES_S)] += count
    used = [at for at, count in enumerate(counts) if count]
    if not used:
        return []
    total, top = sum(counts), max(counts)
    return [
        Bar(_between(at), counts[at], counts[at] / total, float((counts[at] / top) ** 0.5))
        for at in range(used[0], used[-1] + 1)
    ]


def _between(at: int) -> str:
    if at == 0:
        return f"under {_time(EDGES_S[0])}"
    if at == len(EDGES_S):
        return f"{_time(EDGES_S[-1])} and more"
    return f"{_time(EDGES_S[at - 1])} to {_time(EDGES_S[at])}"


def _round_up(value: float) -> float:
    power = 10.0 ** floor(log10(value))
    return float(next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9)))


def _short(value: float) -> str:
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{round(value, 6):.3g}"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.3g} min" if seconds >= 120 else format_duration(seconds)
