"""The report: one HTML page that opens from disk, without scripts and without a request to anywhere.

The template (``report.html.jinja``) escapes everything that it is given; here only numbers are prepared for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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


def _charts(profile: Profile, moments: Sequence[Moment]) -> list[dict[str, Any]]:
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


def line_chart(
    title: str, unit: str, times_s: Sequence[float], values: Sequence[float], maximum: float = 0.0
) -> dict[str, Any]:
    """A chart of one value over time, from 0 up to ``maximum`` or what there is: points of an SVG ``polyline``, the
    area under it, ``(y, label)`` of horizontal lines, the time at the right edge, and the chart in words."""
    top, end = max([*values, maximum, 1e-9]), max(times_s[-1], 1e-9)
    points = [
        (WIDTH * time / end, HEIGHT * (1 - value / top)) for time, value in zip(times_s, values, strict=True)
    ]
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    mean, least, most = map(format_rate, (sum(values) / len(values), min(values), max(values)))
    return {
        "title": title,
        "unit": unit,
        "points": drawn,
        "area": f"{points[0][0]:.1f},{HEIGHT} {drawn} {points[-1][0]:.1f},{HEIGHT}",
        "ticks": [(HEIGHT * (1 - part), format_rate(top * part)) for part in (0.0, 0.5, 1.0)],
        "end": format_duration(end),
        "summary": f"{title}: on average {mean} {unit}, least {least}, most {most}",
    }
