"""A profile as text: one line per stage, what went wrong, and the conclusion in a sentence."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable

from pipegraph.errors import shown
from pipegraph.measurements import StageProfile, in_view
from pipegraph.units import format_duration, format_share as _share, shorten

from .bottleneck import CONSUMER, SATURATED
from .values import Profile

WIDTH = 100
"""Characters of a line at most, and of the table's where the output is no terminal."""
PROSE = 80
"""Characters of a line of sentences where the output is no terminal."""

NARROWEST = 60
NAME_WIDTH = 22
SHORTEST_NAME = 8
SPARED = ("bytes/s", "items", "items/s")
"""Columns that a narrow terminal is spared, in this order."""

SHOWN_QUARANTINED = 5

HAND_OVER = 0.2
"""Share of its time for which training waits where hand-overs set the pace, twice what all stages work or more."""

IDLE = 0.5
"""A training loop that waits for more than this share of its time does not set the pace."""

ADVISED = ("stage", "storage", "lock")
"""Causes for which other sizes may be a remedy."""

CROWDED = 4
"""Cores that one stage runs on in threads before processes are proposed for it: decoding for a GPU, four threads gave
what four processes did, fourteen half (benchmarks/gpu_training.py, record of 2026-11-23)."""

KEEPS_UP = 0.05
"""A training loop that waits for less than this share of its time is said to be kept up with."""


def render(profile: Profile) -> str:
    """The table, as wide as the terminal at most: names are shortened, columns left out, long texts cut or wrapped."""
    given = shutil.get_terminal_size((0, 24)).columns
    width = max(NARROWEST, min(WIDTH, given or WIDTH))
    prose = width if given else PROSE
    rows = [["stage", *(title for _, _, title in in_view(StageProfile, "table"))]]
    rows += [_row(name, stage) for name, stage in profile.stages.items()]
    columns = list(zip(*rows, strict=True))
    for spared in SPARED:
        if SHORTEST_NAME + sum(max(map(len, column)) + 2 for column in columns[1:]) > width:
            columns = [column for column in columns if column[0] != spared]
    widths = [max(map(len, column)) for column in columns]
    widths[0] = min(widths[0], max(SHORTEST_NAME, width - sum(widths[1:]) - 2 * len(widths[1:])))
    lines = textwrap.wrap(_headline(profile), prose)
    for row in zip(*columns, strict=True):
        cells = [f"{shorten(row[0], widths[0]):<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines += _remarks(profile)
    return "\n".join([*(_cut(line, width) for line in lines), *textwrap.wrap(conclude(profile), prose)])


def conclude(profile: Profile) -> str:
    """The bottleneck in a sentence."""
    if not profile.items:
        return "Nothing has been delivered yet."
    if not profile.conclusive:
        return "Passes ran too briefly to say what sets the pace."
    waited = profile.stall_share
    stall = f"training waited for data {_share(waited)} of the time"
    if profile.bottleneck == CONSUMER and profile.cause != "bursts":
        worked = sum(stage.busy * stage.workers for stage in profile.stages.values())
        if waited > IDLE or waited > max(HAND_OVER, 2 * worked):
            return (
                f"No stage sets the pace: {stall}, and all stages together worked {_share(worked)} of it. "
                "Starting passes and handing items over take the rest: longer passes and larger batches help, or "
                "backend='inline' for cheap stages."
            )
        keeps_up = ", the pipeline keeps up" if waited < KEEPS_UP else ""
        return f"Training sets the pace{keeps_up}: {stall}.{_crowded(profile, profile.stages)}"
    if profile.cause == "bursts":
        queues = [
            f"between {each.producer!r} and {'training' if each.consumer == CONSUMER else repr(each.consumer)}"
            for each in profile.channels
            if each.in_bursts
        ]
        which = f"queue {queues[0]} was" if len(queues) == 1 else f"queues {', '.join(queues)} were"
        return f"Work comes in bursts: {stall}, and the {which} sometimes empty and sometimes full. {profile.advice}"
    name, stage = profile.bottleneck, profile.stages[profile.bottleneck]
    said = f"Stage {name!r} holds training back: {_why(profile, stage)}; {stall}."
    if profile.cause == "stage":
        said += _crowded(profile, [name])
    return f"{said} {profile.advice}" if profile.cause in ADVISED else said


def _crowded(profile: Profile, names: Iterable[str]) -> str:
    """What to try where a stage runs on many cores in threads, which may then wait for the GIL, as may training.

    Waits of microseconds, many for each sample, are seen in no measure of a single thread.
    """
    cores = {
        name: (stage.running or 0.0) * stage.workers
        for name, stage in ((each, profile.stages[each]) for each in names)
        if stage.backend.in_trainer
    }
    name = max(cores, key=cores.__getitem__, default="")
    if not name or cores[name] <= CROWDED or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return ""
    return (
        f" {name!r} runs {cores[name]:.1f} cores' worth in threads, which share one interpreter: "
        'try backend="process" for it.'
    )


def _why(profile: Profile, stage: StageProfile) -> str:
    workers = "its worker is" if stage.workers == 1 else f"its {stage.workers} workers are"
    if profile.cause == "lock":
        cores = (stage.running or 0.0) * stage.workers
        return (
            f"it holds the GIL ({cores:.1f} cores' worth of running), for which other threads wait "
            f'{format_duration(profile.wake_s)} each time; more threads do not help: give it backend="process", '
            f"or use code that releases the lock"
        )
    busy = f"{workers} busy {_share(stage.busy)} of the time while what follows waits for it"
    if stage.drawing > stage.busy:
        return f"its sampler draws {_share(stage.drawing)} of the time, one index after the other"
    if profile.cause == "cores":
        used = f"{profile.cores_used:.1f} of {profile.cores:g} are in use"
        if profile.cores_used < SATURATED * profile.cores:
            used = f"this program gets {profile.cores_used:.1f} of {profile.cores:g}, others the rest"
        lacked = min(stage.coreless, stage.busy - min(stage.busy, stage.running or 0.0))  # beside passes too
        return (
            f"{busy}, and no core is free: {used}, and its work waits {_share(lacked)} of the time for one; "
            "more workers do not help"
        )
    if profile.cause == "storage":
        return (
            f"{workers} reading {_share(stage.busy)} of the time, and on a core only {_share(stage.running or 0.0)}: "
            "storage is slower than training"
        )
    return busy


def _headline(profile: Profile) -> str:
    passes = f"{profile.passes} pass" + ("" if profile.passes == 1 else "es")
    head = (
        f"profile of {shorten(profile.graph, 24)!r}: {passes}, {profile.elapsed_s:.2f} s, "
        f"{profile.samples_per_s:,.0f} samples/s, waited {profile.stall_s:.2f} s"
    )
    if profile.first_batch_s is not None:
        head += f", first batch {profile.first_batch_s:.2f} s"
    return head


def _row(name: str, stage: StageProfile) -> list[str]:
    """A stage without workers of its own shows only what was measured of it."""
    cells = [shorten(name, NAME_WIDTH)]
    for field, each, _ in in_view(StageProfile, "table"):
        value = getattr(stage, field)
        cells.append(each.text(value) if value or stage.workers else "")
    if not stage.workers:
        cells[1] = "left out" if stage.within is None else f"in {shorten(stage.within, NAME_WIDTH)}"
    return cells


def _remarks(profile: Profile) -> list[str]:
    lines = []
    for name, stage in profile.stages.items():
        counts = [(getattr(stage, field), title) for field, _, title in in_view(StageProfile, "remark")]
        found = [f"{count:,} {title}" for count, title in counts if count]
        found += [f"{what} {count:,}" for what, count in stage.counters.items()]
        if stage.grown_to is not None:
            found.append(f"queue grew to {stage.grown_to} items, as the graph stood still")
        if found:
            lines.append(f"{shorten(name, NAME_WIDTH)}: {', '.join(found)}")
    if profile.quarantined:
        lines.append(f"quarantined: {profile.quarantined_count:,}")
        lines += [
            f"  {shown(entry.key)} at position {entry.position}, epoch {entry.epoch}, in {entry.stage!r}: {entry.error}"
            for entry in profile.quarantined[:SHOWN_QUARANTINED]
        ]
        if profile.quarantined_count > SHOWN_QUARANTINED:
            lines.append("  ...")
    return lines


def _cut(line: str, width: int) -> str:
    line = line.replace("\n", " ")
    return line if len(line) <= width else line[: width - 1] + "…"
