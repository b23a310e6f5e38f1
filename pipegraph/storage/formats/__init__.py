"""Shard formats, found by file name.

A new format is one class (docs/formats.md) and one line of `_FORMATS`, or a call of `register_format`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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

_PACKING = re.compile(r"\.(gz|zst|zstd)(?=(\.bin)?$)", re.IGNORECASE)

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


def refuse_mixed(folder: str, names: Sequence[str]) -> None:
    """Raises DataError for a folder with shards of different formats, or with one shard packed and unpacked."""
    first: dict[type, str] = {}
    for name in {name[name.find(".") :].lower(): name for name in reversed(names)}.values():
        form = format_of(name)
        kind = type(getattr(form, "inner", form))
        first[kind] = min(name, first.get(kind, name))
    if len(first) > 1:
        shown = sorted(first.values())
        pattern = f"{folder.rstrip('/')}/*{_suffix(shown[0])}"
        raise DataError(
            f"parts {folder!r}: shards of different formats in one folder, such as {' and '.join(map(repr, shown))}: "
            f"name those that are meant by a pattern, such as {pattern!r}, or keep each format in a folder of its own"
        )
    there = set(names)
    packed = next(
        (name for name in names if (plain := _PACKING.sub("", name)) != name and plain in there), None
    )
    if packed is not None:
        raise DataError(
            f"parts {folder!r}: {packed!r} is {_PACKING.sub('', packed)!r} packed: its samples would be read twice; "
            "remove one of the two, or name those that are meant by a pattern"
        )


def _suffix(name: str) -> str:
    """The longest registered suffix of a name; empty where it has none."""
    with _lock:
        return max((s for s in _formats if name.lower().endswith(s)), key=len, default="")


def format_of(part: Part | str) -> Format:
    """The format of a part, by the longest registered suffix of its name."""
    name = (part if isinstance(part, Part) else Part(part)).name.lower()
    suffix = _suffix(name)
    if suffix:
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
