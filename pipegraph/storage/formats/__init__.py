"""Shard formats, found by file name.

A new format is one class (docs/formats.md) and one line of `_FORMATS`, or a call of `register_format`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipegraph.errors import DataError
from pipegraph.forks import lock_free_after_fork
from pipegraph.storage.parts import Part
from pipegraph.storage.urls import safe_url

from .arrays import NpyFormat
from .lines import JsonLinesFormat, PackedJsonLinesFormat
from .mds import MdsFormat
from .parquet import ParquetFormat
from .shard_format import Block as Block, BlockSamples as BlockSamples, Format as Format, Sample as Sample
from .tar import TarFormat
from .unpacking import PackedFormat

_PACKED_TAR = re.compile(r"\.(tar\.\w+|tgz|tbz2?|txz|tzst)$")

_UNREAD_TAR = re.compile(r"\.(taz|tbz2?|txz|tlz)$", re.IGNORECASE)
_UNREAD = re.compile(
    r"(\.(bgz|gz|bz2|bzip2|xz|lzma|lz|lz4|lzo|zst|zstd|z|zip|7z|br|sz|snappy)"
    r"|(\.[0-9a-f]{8})?\.partial|\.part|\.crdownload|\.download|\.incomplete|\.tmp|_\.gstmp)$",
    re.IGNORECASE,
)
"""Packings that some shards cannot be read in, and what programs that copy files append to names until they end."""

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


def check_folder(folder: str, names: Sequence[str], shards: Sequence[str], skip: bool = False) -> None:
    """Raises DataError where not all shards of a folder would be read once: some have another format, one is there
    packed and unpacked, or, unless ``skip``, one is packed in another way or not whole.
    """
    kinds: dict[type, str] = {}
    stems: dict[str, list[str]] = {}
    for name in sorted(shards):
        kinds.setdefault(_kind(name), name)
        stems.setdefault(name[: len(name) - len(suffix_of(name))], []).append(name)
    if len(kinds) > 1:
        shown = sorted(kinds.values())
        raise DataError(
            f"parts {folder!r}: shards of different formats in one folder, such as {' and '.join(map(repr, shown))}: "
            f"name those that are meant by a pattern, such as {_pattern(folder, shown[0])}, or keep each format in a "
            "folder of its own"
        )
    twice = next((found for found in stems.values() if len(found) > 1), None)
    if twice is not None:
        raise DataError(
            f"parts {folder!r}: {twice[1]!r} is {twice[0]!r} packed: its samples would be read twice; "
            "remove one of the two, or name those that are meant by a pattern"
        )
    for name in [] if skip else sorted(names):
        whole = unread(name)
        # What is left beside a whole shard is none.
        if whole and not name.startswith(".") and whole not in shards and not kinds.keys() - {_kind(whole)}:
            raise DataError(
                f"parts {folder!r}: {name!r} is packed in a way that is not read here, or not whole, by its name: "
                f"unpack, finish or remove it, or name the others by a pattern, such as "
                f"{_pattern(folder, shards[0] if shards else whole)}"
            )


def _pattern(folder: str, shard: str) -> str:
    return repr(f"{folder.rstrip('/')}/*{suffix_of(shard)}")


def unread(name: str) -> str:
    """The name of the shard that a name would be, unpacked and complete; empty for others."""
    whole = _UNREAD.sub("", _UNREAD_TAR.sub(".tar", name))
    return whole if suffix_of(whole) and not suffix_of(name) else ""


def _kind(name: str) -> type:
    form = format_of(name)
    return type(getattr(form, "inner", form))


def suffix_of(name: str) -> str:
    """The longest registered suffix of a name; empty where it has none."""
    with _lock:
        return max((s for s in _formats if name.lower().endswith(s)), key=len, default="")


def slash_note(part: Part) -> str:
    """What is to be said of a URL that may be meant for a folder; empty for others."""
    if part.is_local or "." in part.name:
        return ""
    return f"; a folder's URL ends in a slash: {safe_url(part.uri) + '/'!r}"


def format_of(part: Part | str) -> Format:
    """The format of a part, by the longest registered suffix of its name."""
    name = (part if isinstance(part, Part) else Part(part)).name.lower()
    suffix = suffix_of(name)
    if suffix:
        return _formats[suffix]
    if _PACKED_TAR.search(name):
        raise DataError(
            f"part {name!r}: a tar can be read plain and packed with gz or zst (.tar, .tar.gz, .tgz, .tar.zst), and in "
            "no other packing: decompress it"
        )
    if name.endswith(".csv"):
        raise DataError(
            f"part {name!r}: a CSV file is a table, not a shard: ops.FromTable(pyarrow.csv.read_csv(path))"
        )
    raise DataError(
        f"part {name!r}: no format for this suffix (known: {', '.join(known_suffixes())}); "
        f"register_format(...) adds one{slash_note(part) if isinstance(part, Part) else ''}"
    )


_FORMATS = (
    TarFormat(),
    ParquetFormat(),
    JsonLinesFormat(),
    PackedJsonLinesFormat(),
    NpyFormat(),
    MdsFormat(),
    PackedFormat(MdsFormat(), (".mds.zstd", ".mds.gz")),
    PackedFormat(TarFormat(), (".tar.gz", ".tgz", ".tar.zst", ".tar.zstd")),
)
for _format in _FORMATS:
    register_format(_format)
