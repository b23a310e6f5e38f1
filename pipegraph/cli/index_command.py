"""``pipegraph index``: manifests of shards."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence

from pipegraph.cli.progress_bars import ProgressLine
from pipegraph.errors import GraphError, MissingExtraError
from pipegraph.reader.manifests import cache_folder
from pipegraph.storage import IndexProgress, StoreClient, build_manifest, expand_parts
from pipegraph.storage.beside import manifest_beside
from pipegraph.storage.parts import is_url
from pipegraph.storage.side_files import MANIFEST
from pipegraph.storage.stores import safe_url
from pipegraph.units import counted, format_bytes, parse_bytes


def run_index(
    parts: Sequence[str], out: str | None, checksums: bool, block_size: str | None, store: Sequence[str]
) -> None:
    """See ``pipegraph index --help``. Shards that lie in several folders, or come over HTTP, have their manifest in the
    current folder."""
    options = dict(_option(each) for each in store)
    block_nbytes = None if block_size is None else parse_bytes(block_size, "--block-size")
    with contextlib.ExitStack() as stack:
        client = journal = None
        if any(map(is_url, [out or "", *parts])):
            client = stack.enter_context(StoreClient(options))
        found = expand_parts(parts, store=client)
        if out is None:
            out = manifest_beside(found)
            if out is None or out.startswith(("http://", "https://")):
                out = MANIFEST
        if is_url(out):
            folder = cache_folder() / "indexing"
            folder.mkdir(parents=True, exist_ok=True)
            journal = folder / hashlib.blake2b(out.encode(), digest_size=16).hexdigest()
        progress = stack.enter_context(ProgressLine(""))

        def show(state: IndexProgress) -> None:
            progress.count("indexing", state.parts_done, state.parts, f"{state.samples:,} samples")

        try:
            manifest = build_manifest(
                found,
                out,
                store=client,
                checksums=checksums,
                block_nbytes=block_nbytes,
                progress=show,
                journal=journal,
            )
        except MissingExtraError as error:
            if checksums:
                error.add_note("or index by headers only: --no-checksums")
            raise
    size = format_bytes(manifest.nbytes)
    samples, shards = counted(len(manifest), "sample"), counted(len(manifest.parts), "shard")
    print(f"{samples} in {shards} ({size}): wrote {safe_url(out)}")


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise GraphError(f"--store {name!r}: an option is name=value, such as region=eu-1")
    return name, value
