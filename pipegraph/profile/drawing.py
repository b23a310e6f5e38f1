"""Where the report's picture of the graph has its boxes and lines: stages from left to right. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipegraph.units import format_duration, format_share

from .bottleneck import CONSUMER
from .values import Profile

BOX_WIDTH, BOX_HEIGHT = 136, 56
GAP_X, GAP_Y = 96, 64
MARGIN = 20


def layers(names: Iterable[str], edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Names by their distance from the sources: each lies right behind the last of those it reads from.

    Args:
        names: in topological order.
        edges: ``(from, to)``.
    """
    above: dict[str, list[str]] = {}
    for producer, consumer in edges:
        above.setdefault(consumer, []).append(producer)
    depth: dict[str, int] = {}
    found: list[list[str]] = []
    for name in names:
        depth[name] = max((depth[each] + 1 for each in above.get(name, ())), default=0)
        if depth[name] == len(found):
            found.append([])
        found[depth[name]].append(name)
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
