"""The report: one HTML page that opens from disk, without scripts and without a request to anywhere.

The template (``report.html.jinja``) escapes everything that it is given; here only numbers are prepared for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipegraph.errors import extra_module, shown
from pipegraph.measurements import StageProfile, in_view
from pipegraph.units import format_bytes, format_count, format_duration, format_rate, format_share, shorten

from .bottleneck import CONSUMER
from .table import conclude
from .values import Profile

if TYPE_CHECKING:
    from jinja2 import Template

    from .record import Moment

SHOWN_QUARANTINED = 100
"""Samples that the page lists; the rest is a number."""


@cache
def page_template() -> Template:
    """Raises MissingExtraError where no report could be written."""
    jinja2 = extra_module("jinja2", "report", "the HTML report")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        **{"share": format_share, "duration": format_duration, "bytes": format_bytes},
        **{"count": format_count, "rate": format_rate, "brief": shorten},
    }
    text = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    template: Template = environment.from_string(text)
    return template


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
        "drawing": drawing(profile),
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
    return page_template().render(facts)


def _charts(profile: Profile, moments: Sequence[Moment]) -> list[dict[str, Any]]:
    """Of what came between each two moments. A wait counts where it ends, also what of it lay before."""
    if len(moments) < 3:
        return []
    took = [(before, after, max(1e-9, after.at_s - before.at_s)) for before, after in pairwise(moments)]
    times = [after.at_s for _, after, _ in took]
    rates = [(after.samples - before.samples) / s for before, after, s in took]
    waited = [min(100.0, 100 * (after.stall_s - before.stall_s) / s) for before, after, s in took]
    made = [
        line_chart("Throughput", "samples/s", times, rates),
        line_chart("Training waited", "% of the time", times, waited, maximum=100.0),
    ]
    for index, channel in enumerate(profile.channels):
        depths = [after.depths[index] if index < len(after.depths) else 0 for _, after, _ in took]
        consumer = "training" if channel.consumer == CONSUMER else channel.consumer
        title = f"Queue {channel.producer} → {consumer}"
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


# -- the picture of the graph ----------------------------------------------------------------------

BOX_WIDTH, BOX_HEIGHT = 136, 56
GAP_X, GAP_Y = 96, 64
MARGIN = 20


def layers(names: Iterable[str], edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Names by their distance from the sources: each lies right behind the last of those it reads from.

    Args:
        names: in topological order.
        edges: ``(from, to)``.
    """
    sorter = TopologicalSorter(dict.fromkeys(names, ()))
    for producer, consumer in edges:
        sorter.add(consumer, producer)
    sorter.prepare()
    found: list[list[str]] = []
    while sorter.is_active():
        found.append(list(sorter.get_ready()))
        sorter.done(*found[-1])
    return found


def drawing(profile: Profile) -> dict[str, Any]:
    """Boxes coloured by how busy their workers are, lines as wide as what passes; stages that were left out are not
    drawn."""
    running = {name: stage for name, stage in profile.stages.items() if stage.workers}
    columns = layers([*running, CONSUMER], [(each.producer, each.consumer) for each in profile.channels])
    tallest = max(map(len, columns))
    places = {
        name: (
            MARGIN + index * (BOX_WIDTH + GAP_X),
            MARGIN + ((tallest - len(column)) / 2 + row) * (BOX_HEIGHT + GAP_Y),
        )
        for index, column in enumerate(columns)
        for row, name in enumerate(column)
    }
    bottom = MARGIN + tallest * (BOX_HEIGHT + GAP_Y)
    boxes = []
    for row, (name, stage) in enumerate(profile.stages.items()):
        if stage.workers:
            below = f"{stage.workers} worker{'s' * (stage.workers > 1)}, {format_share(stage.busy)}"
            about = f"{name}: {below} busy, {stage.rate:,.0f}/s"
            boxes.append((name, name, below, about, stage.busy, f"#stage-{row}"))
    busy, step = 1 - profile.stall_share, f"{format_duration(profile.step_s)} a step"
    about = f"training: {step}, {format_share(busy)} busy"
    boxes.append((CONSUMER, "training", step, about, busy, "#stage-training"))
    most = max((stage.rate for stage in running.values()), default=0.0) or 1.0
    lines = []
    for each in profile.channels:
        (x1, y1), (x2, y2) = places[each.producer], places[each.consumer]
        x1, y1, y2 = x1 + BOX_WIDTH, y1 + BOX_HEIGHT / 2, y2 + BOX_HEIGHT / 2
        path = f"M{x1:g},{y1:g} C{x1 + 48:g},{y1:g} {x2 - 48:g},{y2:g} {x2:g},{y2:g}"
        middle = (x1 + x2) / 2, (y1 + y2) / 2
        if x2 - x1 > GAP_X:  # below the stages that it passes, lest they hide it
            path = f"M{x1:g},{y1:g} C{x1 + 48:g},{y1:g} {x1:g},{bottom:g} {x1 + 48:g},{bottom:g} "
            path += f"H{x2 - 48:g} C{x2:g},{bottom:g} {x2 - 48:g},{y2:g} {x2:g},{y2:g}"
            middle = middle[0], float(bottom)
        rate = profile.stages[each.producer].rate
        lines.append(
            {
                "path": path,
                "width": 1.5 + 10.5 * rate / most,
                "held": f"{each.depth}/{each.capacity}",
                "about": f"{each.producer} to {each.consumer}: {each.depth} of {each.capacity} items, {rate:,.1f}/s",
                "x": middle[0],
                "y": middle[1],
            }
        )
    return {
        "width": 2 * MARGIN + len(columns) * (BOX_WIDTH + GAP_X) - GAP_X,
        "height": bottom + MARGIN,
        "box": (BOX_WIDTH, BOX_HEIGHT),
        "boxes": [(*box, *places[box[0]], box[0] == profile.bottleneck) for box in boxes],
        "lines": lines,
    }
