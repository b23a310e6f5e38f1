"""``pipegraph pack``: a dataset to shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipegraph.cli.progress_bars import ProgressLine
from pipegraph.errors import GraphError
from pipegraph.storage.side_files import MANIFEST
from pipegraph.storage.writing import PackProgress, pack_shards
from pipegraph.units import counted, format_bytes


def run_pack(
    source: str, target: str, format: str, size: str, workers: int | None, shuffle: bool, seed: int
) -> None:
    """Pack ``source`` into the folder ``target``; a run that was stopped resumes."""
    complete = Path(target, MANIFEST).is_file()  # written last: then nothing more is
    with ProgressLine("") as progress:

        def report(state: PackProgress) -> None:
            total, done = state.shards, state.shards_done
            samples = f"{state.samples_done:,} samples"
            if total is None:
                progress.say(f"{done:,} shards, {samples}")
            elif progress.count("packing", done, total, f"{samples}, {format_bytes(state.nbytes)}") and done:
                progress.say(f"{done:,} of {total:,} shards were written before")

        manifest = pack_shards(
            _source(source),
            target,
            format=format,
            size=size,
            workers=workers,
            shuffle=seed if shuffle else None,
            progress=report,
        )
    size_text = format_bytes(manifest.nbytes)
    samples, shards = counted(len(manifest), "sample"), counted(len(manifest.parts), "shard")
    print(f"{samples} in {shards} ({size_text}): {target}{' was complete, nothing was written' * complete}")


def _source(text: str) -> Any:
    """A place as it is; ``FILE:FUNCTION`` as what the function returns."""
    file, colon, _ = text.rpartition(":")
    if not colon or not file.endswith(".py"):
        return text
    from pipegraph.cli.target import load_object  # imports torch, which files are packed without
    from pipegraph.graph import Graph

    found = load_object(text)
    if isinstance(found, Graph):
        raise GraphError(
            f"{text} is a graph; give a function that yields samples, such as one with "
            "`with graph.loader() as loader: yield from loader`"
        )
    return found
