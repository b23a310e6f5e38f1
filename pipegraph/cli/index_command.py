"""``pipegraph index``: manifests of shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipegraph.cli.progress_bars import Progress
from pipegraph.errors import MissingExtraError
from pipegraph.storage import IndexProgress, build_manifest
from pipegraph.units import format_bytes


def run_index(parts: Sequence[str], out: Path, checksums: bool, pieces: bool) -> None:
    """Index ``parts`` into the manifest ``out``; a run that was stopped goes on where it was."""
    with Progress("") as progress:
        started = False

        def tell(state: IndexProgress) -> None:
            nonlocal started
            if not started:
                started = True
                progress.start("indexing", state.parts, unit="shards", done=state.parts_done)
                return
            progress.advance(state.parts_done, 1, f"{state.samples:,} samples")

        try:
            manifest = build_manifest(list(parts), out, checksums=checksums, pieces=pieces, progress=tell)
        except MissingExtraError as error:
            if checksums or pieces:
                error.add_note("or index by headers only: --no-checksums --no-pieces")
            raise
    size = format_bytes(manifest.nbytes)
    print(f"{len(manifest):,} samples in {len(manifest.parts):,} shards ({size}): wrote {out}")
