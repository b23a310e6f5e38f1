"""Shard formats, found by file name.

A new format is one class (docs/formats.md) and one line of `_FORMATS`, or a call of `register_format`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipegraph.errors import DataError
from pipegraph.forks import lock_free_after_fork
from pipegraph.storage.parts import Part

from .arrays import NpyFormat
from .lines import JsonLinesFormat, PackedJsonLinesFormat
from .mds import MdsFormat
from .parquet import ParquetFormat
from .shard_format import Block as Block, BlockSamples as BlockSamples, Format as Format, Sample as Sample
from .tar import TarFormat
from .unpacking import PackedFormat

_lock = lock_free_after_fork()
_formats: dict[str, Format] = {}


def register_format(format: Format) -> None:
    """Use `format` for its suffixes, in place of what was registered for them before."""
    with _lock:
        for suffix in format.suffixes:
            _formats[suffix.lower()] = format


def known_suffixes() -> tuple[str, ...]:
    """The registered suffixes, sorted."""
    with _lock:
        return tuple(sorted(_formats))


def check_folder(folder: str, shards: Sequence[str]) -> None:
    """Raises DataError where shards of a folder have different formats."""
    kinds = {_kind(name): name for name in sorted(shards, reverse=True)}
    if len(kinds) > 1:
        shown = sorted(kinds.values())
        pattern = f"{folder.rstrip('/')}/*{suffix_of(shown[0])}"
        raise DataError(
            f"parts {folder!r}: shards of different formats in one folder, such as {' and '.join(map(repr, shown))}: "
            f"name those that are meant by a pattern, such as {pattern!r}, or keep each format in a folder of its own"
        )


def _kind(name: str) -> type:
    form = format_of(name)
    return type(getattr(form, "inner", form))


def suffix_of(name: str) -> str:
    """The longest registered suffix of a name; empty where it has none."""
    with _lock:
        return max((s for s in _formats if name.lower().endswith(s)), key=len, default="")


def format_of(part: Part | str) -> Format:
    """The format of a part, by the longest registered suffix of its name."""
    name = (part if isinstance(part, Part) else Part(part)).name.lower()
    suffix = suffix_of(name)
    if suffix:
        return _formats[suffix]
    if name.endswith(".csv"):
        raise DataError(
            f"part {name!r}: a CSV file is a table, not a shard: ops.FromTable(pyarrow.csv.read_csv(path))"
        )
    raise DataError(
        f"part {name!r}: no format for this suffix (known: {', '.join(known_suffixes())}); "
        "register_format(...) adds one; a folder's URL ends in a slash"
    )


_FORMATS = (
    TarFormat(),
    ParquetFormat(),
    JsonLinesFormat(),
    PackedJsonLinesFormat(JsonLinesFormat(), (".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")),
    NpyFormat(),
    MdsFormat(),
    PackedFormat(MdsFormat(), (".mds.zstd", ".mds.gz")),
    PackedFormat(TarFormat(), (".tar.gz", ".tgz", ".tar.zst", ".tar.zstd")),
)
for _format in _FORMATS:
    register_format(_format)
