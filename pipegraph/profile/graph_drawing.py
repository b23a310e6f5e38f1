"""Layout of stages and queues in the report: rows from the sources down to training. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pipegraph.planning.drawing import layers
from pipegraph.units import shorten

from .bottleneck import CONSUMER
from .values import Profile

BOX_WIDTH, BOX_HEIGHT = 220, 58
GAP_X, GAP_Y = 24, 46
NAME_LETTERS = 22
THINNEST, THICKEST = 1.5, 12.0


@dataclass(frozen=True)
class StageBox:
    """A stage.

    Attributes:
        heat: 0..4, from idle to always busy.
    """

    name: str
    label: str
    about: str
    x: float
    y: float
    heat: int
    holds: bool


@dataclass(frozen=True)
class Line:
    """A queue: an SVG path as wide as what flows through it, and what it says."""

    path: str
    width: float
    title: str
    label: str
    x: float
    y: float


@dataclass(frozen=True)
class GraphDrawing:
    """Boxes and lines in an area of ``width`` by ``height``."""

    boxes: tuple[StageBox, ...]
    lines: tuple[Line, ...]
    width: float
    height: float


def draw(profile: Profile) -> GraphDrawing:
    """The graph of a profile; stages that were left out are not drawn."""
    running = [name for name, stage in profile.stages.items() if stage.workers]
    rows = layers([*running, CONSUMER], [(each.producer, each.consumer) for each in profile.channels])
    widest = max(len(each) for each in rows)
    width = widest * (BOX_WIDTH + GAP_X) + GAP_X
    places: dict[str, tuple[float, float]] = {}
    for row, names in enumerate(rows):
        taken = len(names) * (BOX_WIDTH + GAP_X) - GAP_X
        for index, name in enumerate(names):
            places[name] = (width - taken) / 2 + index * (BOX_WIDTH + GAP_X), row * (BOX_HEIGHT + GAP_Y) + 8
    boxes = tuple(_box(profile, name, places[name]) for name in [*running, CONSUMER])
    lines = tuple(_lines(profile, places))
    height = len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y + 16
    return GraphDrawing(boxes, lines, width, height)


def _box(profile: Profile, name: str, place: tuple[float, float]) -> StageBox:
    if name == CONSUMER:
        busy = 1 - profile.stall_s / profile.elapsed_s if profile.elapsed_s else 0.0
        about = f"{1e3 * profile.step_s:.3g} ms a step, busy {100 * busy:.0f} %"
        return StageBox(name, "training", about, *place, _heat(busy), profile.bottleneck == CONSUMER)
    stage = profile.stages[name]
    label = shorten(name, NAME_LETTERS)
    workers = f"{stage.workers} worker" + ("" if stage.workers == 1 else "s")
    about = f"{workers}, busy {100 * stage.busy:.0f} %, {stage.rate:,.0f}/s"
    return StageBox(name, label, about, *place, _heat(stage.busy), profile.bottleneck == name)


def _heat(busy: float) -> int:
    return min(4, int(busy * 5))


def _lines(profile: Profile, places: dict[str, tuple[float, float]]) -> list[Line]:
    found = []
    most = max((stage.rate for stage in profile.stages.values()), default=0.0)
    for each in profile.channels:
        (x1, y1), (x2, y2) = places[each.producer], places[each.consumer]
        x1, y1, x2 = x1 + BOX_WIDTH / 2, y1 + BOX_HEIGHT, x2 + BOX_WIDTH / 2
        middle = (y1 + y2) / 2
        rate = profile.stages[each.producer].rate
        share = rate / most if most else 0.0
        found.append(
            Line(
                path=f"M{x1:.0f},{y1:.0f} C{x1:.0f},{middle:.0f} {x2:.0f},{middle:.0f} {x2:.0f},{y2:.0f}",
                width=THINNEST + (THICKEST - THINNEST) * share,
                title=f"{each.producer} → {each.consumer}: {each.depth} of {each.capacity} items, {rate:,.1f}/s",
                label=f"{each.depth}/{each.capacity}",
                x=(x1 + x2) / 2 + 10,
                y=middle + 4,
            )
        )
    return found
