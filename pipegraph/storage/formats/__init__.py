"""Shard formats, found by file name.

A new format is one class (docs/formats.md) and one line of `_FORMATS`, or a call of `register_format`.
"""

from __future__ import annotations

import re

from pipegraph.errors import DataError
from pipegraph.forks import lock_free_after_fork
from pipegraph.storage.parts import Part

from .arrays import NpyFormat, NpzFormat, TokenFormat as TokenFormat
from .lines import JsonLinesFormat, PackedJsonLinesFormat
from .litdata import LitDataFormat as LitDataFormat
from .mds import MdsFormat
from .parquet import ParquetFormat
from .shard_format import Block as Block, Format as Format, Sample as Sample
from .tar import TarFormat
from .unpacking import PackedFormat

_PACKED_TAR = re.compile(r"\.(tar\.\w+|tgz|tbz2?|txz|tzst)$")

_lock = lock_free_after_fork()
_formats: dict[str, Format] = {}


def register_format(format: Format) -> None:
    """Use `format` for its suffixes, in place of what was registered for them before."""
    with _lock:
        for suffix in format.suffixes:
            _formats[suffix.lower()] = format


def known_suffixes(*, holds_samples: bool = False) -> tuple[str, ...]:
    """The registered suffixes, sorted; with ``holds_samples`` only those of files that are never one sample."""
    with _lock:
        return tuple(sorted(s for s, form in _formats.items() if form.holds_samples or not holds_samples))


def format_of(part: Part | str) -> Format:
    """The format of a part, by the longest registered suffix of its name."""
    name = (part if isinstance(part, Part) else Part(part)).name.lower()
    with _lock:
        suffix = max((s for s in _formats if name.endswith(s)), key=len, default=None)
        if suffix is not None:
            return _formats[suffix]
    if _PACKED_TAR.search(name):
        raise DataError(
            f"part {name!r}: a compressed tar cannot be read in place; decompress it (gunzip, zstd -d), and "
            "compress the samples inside instead where that pays"
        )
    raise DataError(
        f"part {name!r}: no format for this suffix (known: {', '.join(known_suffixes())}); "
        "register_format(...) adds one"
    )


_FORMATS = (
    TarFormat(),
    ParquetFormat(),
    JsonLinesFormat(),
    PackedJsonLinesFormat(),
    NpyFormat(),
    NpzFormat(),
    MdsFormat(),
    PackedFormat(MdsFormat(), (".mds.zstd", ".mds.gz")),
    LitDataFormat(),
    PackedFormat(LitDataFormat(), (".zstd.bin",)),
)
for _format in _FORMATS:
    register_format(_format)
