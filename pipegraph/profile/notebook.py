"""A profile in a notebook: one small table that needs no script and no style sheet."""

from __future__ import annotations

from html import escape

from .table import conclude
from .values import Profile, StageProfile

CELL = "padding:2px 10px;text-align:right"


def render_html(profile: Profile) -> str:
    """An HTML fragment; everything from the data is escaped."""
    head = "".join(
        f'<th style="{CELL}">{each}</th>'
        for each in ("stage", "workers", "items/s", "p50", "p99", "busy", "starved", "blocked")
    )
    rows = [
        _row(name, stage, name == profile.bottleneck)
        for name, stage in profile.stages.items()
        if stage.workers
    ]
    return (
        f"<div><b>{escape(profile.graph)}</b>: {profile.samples_per_s:,.0f} samples/s, waited "
        f"{profile.stall_s:.2f} s of {profile.elapsed_s:.1f} s"
        f'<table style="border-collapse:collapse;margin:6px 0"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>{escape(conclude(profile))}</div>"
    )


def _row(name: str, stage: StageProfile, holds: bool) -> str:
    shown = f"<b>{escape(name)}</b>" if holds else escape(name)
    values = [
        f"{stage.workers}",
        f"{stage.rate:,.1f}",
        f"{stage.service_p50_s * 1e3:,.3g} ms",
        f"{stage.service_p99_s * 1e3:,.3g} ms",
        *(f"{100 * share:.0f} %" for share in (stage.busy, stage.starved, stage.blocked)),
    ]
    cells = "".join(f'<td style="{CELL}">{value}</td>' for value in values)
    return f'<tr><td style="{CELL};text-align:left">{shown}</td>{cells}</tr>'
