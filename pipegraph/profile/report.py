"""The report: one HTML page that opens from disk, without scripts and without a request to anywhere.

The template (``report.html.jinja``) escapes everything that it is given; here only numbers are prepared for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipegraph.errors import extra_module, shown
from pipegraph.measurements import StageProfile, in_view
from pipegraph.profile.drawing import QueueLine, StageBox, picture
from pipegraph.units import (
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    format_share,
    shorten,
)

from .bottleneck import CONSUMER
from .table import conclude
from .values import Profile

if TYPE_CHECKING:
    from jinja2 import Template

    from .record import Moment

SHOWN_QUARANTINED = 100
"""Samples that the page lists; the rest is a number."""


def require_jinja() -> None:
    """Raises MissingExtraError where no report could be written."""
    _template()


@cache
def _template() -> Template:
    jinja2 = extra_module("jinja2", "report", "the HTML report")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        **{"share": format_share, "duration": format_duration, "bytes": format_bytes},
        **{
            "count": format_count,
            "rate": format_rate,
            "brief": shorten,
            "place": _place,
        },
    }
    text = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    template: Template = environment.from_string(text)
    return template


def _place(name: str) -> str:
    return "training" if name == CONSUMER else name


def render_report(profile: Profile, moments: Sequence[Moment] = ()) -> str:
    """The page about the time of a profile; without ``moments`` the charts over time are left out.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    quarantined = [
        {"key": shown(each.key), "position": each.position, "epoch": each.epoch, "stage": each.stage}
        | {"error": each.error}
        for each in profile.quarantined[:SHOWN_QUARANTINED]
    ]
    facts: dict[str, Any] = {
        "profile": profile,
        "conclusion": conclude(profile),
        "consumer": CONSUMER,
        "drawing": _drawing(profile),
        "charts": _charts(profile, moments),
        "quarantined": quarantined,
        "stall_share": profile.stall_share,
        "columns": in_view(StageProfile, "page"),
        "training": {
            "items": format_count(profile.items),
            "service_mean_s": format_duration(profile.step_s),
            "busy": format_share(1 - profile.stall_share),
            "starved": format_share(profile.stall_share),
        },
    }
    return _template().render(facts)


def _drawing(profile: Profile) -> str:
    """The graph; stages that were left out are not drawn."""

    def box(name: str, below: str, about: str, busy: float, row: object) -> StageBox:
        kind = f"h{min(4, int(busy * 5))}{' holds' if name == profile.bottleneck else ''}"
        return StageBox(name, f"{below}, {format_share(busy)}", about, kind, _place(name), f"#stage-{row}")

    boxes = []
    for row, (name, stage) in enumerate(profile.stages.items()):
        if stage.workers:
            below = f"{stage.workers} worker" + ("" if stage.workers == 1 else "s")
            about = f"{name}: {below}, busy {format_share(stage.busy)}, {stage.rate:,.0f}/s"
            boxes.append(box(name, below, about, stage.busy, row))
    busy, step = 1 - profile.stall_share, format_duration(profile.step_s)
    about = f"training: {step} a step, busy {format_share(busy)}"
    boxes.append(box(CONSUMER, f"{step} a step", about, busy, "training"))
    most = max((stage.rate for stage in profile.stages.values()), default=0.0) or 1.0
    lines = []
    for each in profile.channels:
        rate = profile.stages[each.producer].rate
        held = f"{each.depth}/{each.capacity}"
        about = f"{each.producer} → {_place(each.consumer)}: {held} items, {rate:,.1f}/s"
        lines.append(QueueLine(each.producer, each.consumer, held, about, 1.5 + 10.5 * rate / most))
    return picture(f"the pipeline {profile.graph!r}", boxes, lines)


def _charts(profile: Profile, moments: Sequence[Moment]) -> list[Chart]:
    if len(moments) < 2:
        return []
    times = [moment.end_s for moment in moments]
    made = [
        line_chart("Throughput", "samples/s", times, [moment.samples_per_s for moment in moments]),
        line_chart(
            "Training waited",
            "% of the time",
            times,
            # A wait counts where it ends, also what of it lay before.
            [
                min(100.0, 100 * moment.stall_s / max(1e-9, moment.end_s - moment.start_s))
                for moment in moments
            ],
            maximum=100.0,
        ),
    ]
    for index, channel in enumerate(profile.channels):
        depths = [moment.depths[index] if index < len(moment.depths) else 0.0 for moment in moments]
        title = f"Queue {channel.producer} → {_place(channel.consumer)}"
        made.append(line_chart(title, "items", times, depths, maximum=float(channel.capacity)))
    return made


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
