"""``pipegraph index`` and ``pipegraph pack``: manifests of shards, and a dataset to shards."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipegraph.cli.progress_bars import ProgressLine
from pipegraph.errors import GraphError
from pipegraph.reader.manifests import manifest_beside
from pipegraph.storage import build_manifest
from pipegraph.storage.indexing import IndexProgress
from pipegraph.storage.parts import MANIFEST, expand_parts, is_url
from pipegraph.storage.stores import StoreClient, safe_url
from pipegraph.storage.writing.pack import PackProgress, pack_shards
from pipegraph.units import counted, format_bytes, parse_bytes


def run_index(parts: Sequence[str], out: str | None, checksums: bool, block_size: str | None) -> None:
    """See ``pipegraph index --help``. Shards that lie in several folders, or come over HTTP, have their manifest in the
    current folder."""
    block_nbytes = None if block_size is None else parse_bytes(block_size, "--block-size")
    with contextlib.ExitStack() as stack:
        client = None
        if any(map(is_url, [out or "", *parts])):
            client = stack.enter_context(StoreClient())
        found = expand_parts(parts, store=client)
        if out is None:
            out = manifest_beside(found)
            if out is None or out.startswith(("http://", "https://")):
                out = MANIFEST
        progress = stack.enter_context(ProgressLine())

        def show(state: IndexProgress) -> None:
            progress.count("indexing", state.parts_done, state.parts, f"{state.samples:,} samples")

        manifest = build_manifest(
            found, out, store=client, checksums=checksums, block_nbytes=block_nbytes, progress=show
        )
    size = format_bytes(manifest.nbytes)
    samples, shards = counted(len(manifest), "sample"), counted(len(manifest.parts), "shard")
    print(f"{samples} in {shards} ({size}): wrote {safe_url(out)}")


def run_pack(source: str, target: str, format: str, size: str, shuffle: bool, seed: int) -> None:
    """Pack ``source`` into the folder ``target``; a run that was stopped resumes."""
    complete = Path(target, MANIFEST).is_file()  # written last: then nothing more is
    with ProgressLine() as progress:

        def report(state: PackProgress) -> None:
            shards = counted(state.shards, "shard")
            if state.total is None:
                progress.say(f"{shards}, {state.samples:,} samples")
            else:
                progress.count("packing", state.samples, state.total, shards, "samples")

        manifest = pack_shards(
            _source(source),
            target,
            format=format,
            size=size,
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
    from pipegraph.cli.graph_commands import load_object  # imports torch, which files are packed without
    from pipegraph.graph import Graph

    found = load_object(text)
    if isinstance(found, Graph):
        raise GraphError(
            f"{text} is a graph; give a function that yields samples, such as one with "
            "`with graph.loader() as loader: yield from loader`"
        )
    return found
