"""A plan as an SVG picture: stages from left to right, each with its queue. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from pipegraph.planning.plan import Plan, StagePlan
from pipegraph.units import shorten

BOX_WIDTH, BOX_HEIGHT = 136, 56
GAP_X, GAP_Y = 96, 44
MARGIN = 20
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


def plan_svg(plan: Plan) -> str:
    """The picture, complete in itself; its colours follow the reader's light or dark scheme."""
    edges = [(edge.stage, stage.name) for stage in plan.running for edge in stage.upstream]
    edges.append((plan.output.stage, CONSUMER))
    columns = layers([*(stage.name for stage in plan.running), CONSUMER], edges)
    tallest = max(len(column) for column in columns)
    width = 2 * MARGIN + len(columns) * (BOX_WIDTH + GAP_X) - GAP_X
    height = 2 * MARGIN + tallest * (BOX_HEIGHT + GAP_Y) - GAP_Y + 24
    places: dict[str, tuple[float, float]] = {}
    for index, column in enumerate(columns):
        top = (tallest - len(column)) * (BOX_HEIGHT + GAP_Y) / 2 + MARGIN
        for row, name in enumerate(column):
            places[name] = MARGIN + index * (BOX_WIDTH + GAP_X), top + row * (BOX_HEIGHT + GAP_Y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" role="img">',
        f"<title>{escape(f'the pipeline {plan.graph_name!r}')}</title><style>{STYLE}</style>",
    ]
    parts += [
        _edge(plan.stages[producer], places[producer], places[consumer]) for producer, consumer in edges
    ]
    parts += [_stage(stage, *places[stage.name]) for stage in plan.running]
    parts += [_box(*places[CONSUMER], "training", "end", "your loop")]
    return "\n".join([*parts, "</svg>"])


def _stage(stage: StagePlan, x: float, y: float) -> str:
    if stage.backend.in_consumer:
        below = "inline"
    else:
        below = f"{stage.workers} {stage.backend.words[stage.workers > 1]}"
    about = "\n".join([f"{stage.name}: {type(stage.operator).__name__}", *stage.notes])
    return _box(x, y, stage.name, "box", below, about)


def _box(x: float, y: float, name: str, kind: str, below: str, about: str = "") -> str:
    label = shorten(name, NAME_LETTERS)
    middle = x + BOX_WIDTH / 2
    return (
        f"<g><title>{escape(about or name)}</title>"
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="7"/>'
        f'<text class="name" x="{middle:g}" y="{y + BOX_HEIGHT / 2 + 5:g}">{escape(label)}</text>'
        f'<text x="{middle:g}" y="{y + BOX_HEIGHT + 17:g}">{escape(below)}</text></g>'
    )


def _edge(producer: StagePlan, start: tuple[float, float], end: tuple[float, float]) -> str:
    """A line with the queue on it, right behind the stage that fills it; inline stages have none."""
    x1, y1 = start[0] + BOX_WIDTH, start[1] + BOX_HEIGHT / 2
    x2, y2 = end[0], end[1] + BOX_HEIGHT / 2
    passes = x2 - x1 > GAP_X  # over other stages: below them, lest they hide it
    low = max(y1, y2) + (BOX_HEIGHT + GAP_Y) / 2 if passes else y1
    bend = x1 + GAP_X * 3 / 4
    middle = x1 + GAP_X / 2
    path = f"M{x1:g},{y1:g} H{bend:g} "
    if passes:
        path += f"C{bend + 16:g},{y1:g} {bend:g},{low:g} {bend + 28:g},{low:g} H{x2 - 28:g} "
        path += f"C{x2 - 8:g},{low:g} {x2 - 16:g},{y2:g} {x2:g},{y2:g}"
    else:
        path += f"C{bend + 12:g},{y1:g} {x2 - 12:g},{y2:g} {x2:g},{y2:g}"
    line = f'<path d="{path}"/>'
    if producer.backend.in_consumer:
        return line
    held = f"{producer.capacity} {producer.unit}"
    cells = "".join(
        f'<rect class="queue" x="{middle - 21 + 11 * index:g}" y="{y1 - 10:g}" width="9" height="20" rx="2"/>'
        for index in range(CELLS)
    )
    return (
        f"{line}<g><title>a queue of at most {escape(held)}</title>{cells}"
        f'<text x="{middle:g}" y="{y1 + 28:g}">{escape(held)}</text></g>'
    )
