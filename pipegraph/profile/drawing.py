"""A pipeline as an SVG picture: stages from left to right, each with its queue. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape as escape_html

from pipegraph.planning.plan import Plan, StagePlan
from pipegraph.units import shorten

BOX_WIDTH, BOX_HEIGHT = 136, 56
GAP_X, GAP_Y = 96, 44
MARGIN = 20
ROW = 8
"""Columns side by side; a longer pipeline continues in another row below, from the left."""

UNDER = 32
"""From a stage to a line that passes below it, and below the text under it."""

NAME_LETTERS = 14
CELLS = 4
"""Places that a queue is drawn with, whatever its capacity, which stands below it."""

CONSUMER = "consumer"
"""The training loop: a name that no stage may have."""

STYLE = """
text { font-family: system-ui, sans-serif; font-size: 13px; fill: #566074; text-anchor: middle }
.name { font-size: 15px; font-weight: 600; fill: #1c2333 }
.box { fill: #eef1fb; stroke: #3f51b5 } .end { fill: #3f51b5; stroke: #3f51b5 } .end + text { fill: #ffffff }
.queue { fill: #ffffff; stroke: #3f51b5 } path { fill: none; stroke: #3f51b5; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #a9b2c7 } .name { fill: #e7eaf3 }
  .box { fill: #232a42; stroke: #8c9eff } .queue { fill: #161a29; stroke: #8c9eff }
  path { stroke: #8c9eff } .end { fill: #8c9eff; stroke: #8c9eff } .end + text { fill: #161a29 }
}
"""


_NO_XML = dict.fromkeys(
    [*range(9), 11, 12, *range(14, 32), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF],
    "\N{REPLACEMENT CHARACTER}",
)
"""Characters that no XML may have, in any notation."""


def escape(text: str) -> str:
    """A text as SVG, whatever its characters."""
    return escape_html(text.translate(_NO_XML))


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


@dataclass(frozen=True)
class StageBox:
    """A stage, or the training loop: its name in the box, a text below it, and all about it in words.

    Attributes:
        kind: the class of its rectangle.
        link: where a click leads; "" for nowhere.
    """

    name: str
    below: str
    about: str = ""
    kind: str = "box"
    label: str = ""
    link: str = ""


@dataclass(frozen=True)
class QueueLine:
    """From a stage to another, with the queue between them; ``held`` says what it holds, "" for no queue."""

    producer: str
    consumer: str
    held: str
    about: str
    width: float = 2


def plan_svg(plan: Plan) -> str:
    """The picture of a plan, complete in itself; its colours follow the reader's light or dark scheme."""
    boxes = [
        StageBox(
            stage.name,
            stage.backend if stage.backend.in_consumer else _count(stage),
            "\n".join([f"{stage.name}: {type(stage.operator).__name__}", *stage.notes]),
        )
        for stage in plan.running
    ]
    edges = [(edge.stage, stage.name) for stage in plan.running for edge in stage.upstream]
    lines = []
    for producer, consumer in [*edges, (plan.output.stage, CONSUMER)]:
        stage = plan.stages[producer]
        held = "" if stage.backend.in_consumer else f"{stage.capacity} {stage.unit}"
        lines.append(QueueLine(producer, consumer, held, f"a queue of at most {held}"))
    boxes.append(StageBox(CONSUMER, "your loop", "training", "end", "training"))
    return picture(f"the pipeline {plan.graph_name!r}", boxes, lines, STYLE)


def picture(title: str, boxes: Sequence[StageBox], lines: Sequence[QueueLine], style: str = "") -> str:
    """Boxes, in topological order, from left to right, and the lines between them, as an SVG."""
    columns = layers([box.name for box in boxes], [(line.producer, line.consumer) for line in lines])
    width = 2 * MARGIN + min(ROW, len(columns)) * (BOX_WIDTH + GAP_X) - GAP_X
    places: dict[str, tuple[float, float]] = {}
    top = float(MARGIN)
    reach = (
        max(map(len, columns)) * (BOX_HEIGHT + GAP_Y) / 2
    )  # from the middle of a row to its farthest stage
    for first in range(0, len(columns), ROW):
        row = columns[first : first + ROW]
        tallest = max(map(len, row))
        for index, column in enumerate(row):
            above = top + (tallest - len(column)) * (BOX_HEIGHT + GAP_Y) / 2
            for below, name in enumerate(column):
                places[name] = MARGIN + index * (BOX_WIDTH + GAP_X), above + below * (BOX_HEIGHT + GAP_Y)
        top += tallest * (BOX_HEIGHT + GAP_Y) + GAP_Y
    height = top + MARGIN - 2 * GAP_Y + 24
    several = Counter(line.producer for line in lines)
    drawn = []
    for line in lines:
        start, end = places[line.producer], places[line.consumer]
        passed = [y for x, y in places.values() if start[0] < x < end[0] and abs(y - start[1]) <= reach]
        low = max(passed, default=0.0) + BOX_HEIGHT + UNDER
        if passed:
            height = max(height, low + UNDER + MARGIN)
        drawn.append(_line(line, start, end, several[line.producer] > 1, low))
    role = "group" if any(box.link for box in boxes) else "img"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" role="{role}">',
            f"<title>{escape(title)}</title>{f'<style>{style}</style>' if style else ''}",
            *drawn,
            *(_box(box, *places[box.name]) for box in boxes),
            "</svg>",
        ]
    )


def _count(stage: StagePlan) -> str:
    return f"{stage.workers} {stage.backend.words[stage.workers > 1]}"


def _box(box: StageBox, x: float, y: float) -> str:
    label = shorten(box.label or box.name, NAME_LETTERS)
    middle = x + BOX_WIDTH / 2
    tag, opening = ("a", f'<a href="{escape(box.link)}">') if box.link else ("g", "<g>")
    return (
        f"{opening}<title>{escape(box.about)}</title>"
        f'<rect class="{box.kind}" x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="7"/>'
        f'<text class="name" x="{middle:g}" y="{y + BOX_HEIGHT / 2 + 5:g}">{escape(label)}</text>'
        f'<text x="{middle:g}" y="{y + BOX_HEIGHT + 17:g}">{escape(box.below)}</text></{tag}>'
    )


def _line(
    line: QueueLine, start: tuple[float, float], end: tuple[float, float], shared: bool, low: float
) -> str:
    """A line with the queue on it, right behind the stage that fills it; inline stages have none.

    The lines of a stage with several (``shared``) part first, each with its queue on its own part. ``low``: below
    all stages that it passes.
    """
    x1, y1 = start[0] + BOX_WIDTH, start[1] + BOX_HEIGHT / 2
    x2, y2 = end[0], end[1] + BOX_HEIGHT / 2
    bend = x1 + GAP_X * 3 / 4
    middle, height = x1 + GAP_X / 2, y1
    if x2 < x1:  # in a row below: around the end of this one, and between the two
        low = y2 - (BOX_HEIGHT + GAP_Y) / 2 - GAP_Y / 2
        path = f"M{x1:g},{y1:g} H{bend:g} V{low:g} H{MARGIN / 2:g} V{y2:g} H{x2:g}"
    elif x2 - x1 > GAP_X:  # over other stages: below them, lest they hide it
        leave = x1 + 8 if shared else bend
        middle, height = (x1 + GAP_X * 2 / 3, low) if shared else (middle, height)
        path = f"M{x1:g},{y1:g} H{leave:g} C{leave + 16:g},{y1:g} {leave:g},{low:g} {leave + 28:g},{low:g} "
        path += f"H{x2 - 28:g} C{x2 - 8:g},{low:g} {x2 - 16:g},{y2:g} {x2:g},{y2:g}"
    elif shared:
        middle, height = x2 - 28, y2
        path = f"M{x1:g},{y1:g} C{x1 + 24:g},{y1:g} {x1 + 16:g},{y2:g} {x1 + 40:g},{y2:g} H{x2:g}"
    else:
        path = f"M{x1:g},{y1:g} H{bend:g} C{bend + 12:g},{y1:g} {x2 - 12:g},{y2:g} {x2:g},{y2:g}"
    wide = "" if line.width == 2 else f' style="stroke-width:{line.width:.1f}"'
    drawn = f'<path d="{path}"{wide}/>'
    if not line.held:
        return drawn
    cells = "".join(
        f'<rect class="queue" x="{middle - 21 + 11 * index:g}" y="{height - 10:g}" width="9" height="20" rx="2"/>'
        for index in range(CELLS)
    )
    return (
        f"{drawn}<g><title>{escape(line.about)}</title>{cells}"
        f'<text x="{middle:g}" y="{height + 28:g}">{escape(line.held)}</text></g>'
    )
