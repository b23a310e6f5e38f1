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

_PACKING = re.compile(r"\.(gz|zst|zstd)$", re.IGNORECASE)

_UNREAD = re.compile(
    r"\.(bgz|gz|bz2|bzip2|xz|lzma|lz|lz4|lzo|zst|zstd|z|zip|7z|br|sz|snappy)$", re.IGNORECASE
)
"""Packings that some shards cannot be read in."""
_UNREAD_TAR = re.compile(r"\.(tgz|taz|tbz2?|txz|tlz|tzst)$", re.IGNORECASE)
_UNFINISHED = re.compile(
    r"((\.[0-9a-f]{8})?\.partial|\.part|\.crdownload|\.download|\.incomplete|\.tmp|_\.gstmp)$", re.IGNORECASE
)
"""What programs that copy files append to names until they have ended."""

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
        kind = _kind(name)
        first[kind] = min(name, first.get(kind, name))
    if len(first) > 1:
        shown = sorted(first.values())
        pattern = f"{folder.rstrip('/')}/*{suffix_of(shown[0])}"
        raise DataError(
            f"parts {folder!r}: shards of different formats in one folder, such as {' and '.join(map(repr, shown))}: "
            f"name those that are meant by a pattern, such as {pattern!r}, or keep each format in a folder of its own"
        )
    there = set(names)
    packed = next((name for name in names if (plain := _plain(name)) != name and plain in there), None)
    if packed is not None:
        raise DataError(
            f"parts {folder!r}: {packed!r} is {_plain(packed)!r} packed: its samples would be read twice; "
            "remove one of the two, or name those that are meant by a pattern"
        )


def _plain(name: str) -> str:
    """The name of a packed shard, unpacked; else the name itself."""
    return _PACKING.sub("", _UNREAD_TAR.sub(".tar", name))


def is_unread(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a name is that of a shard with one of these suffixes, in a packing that is not read or not whole."""
    return _whole(name).lower().endswith(suffixes) and not name.lower().endswith(known_suffixes())


def _whole(name: str) -> str:
    """The name of what an unread file would be, unpacked and complete; else the name itself."""
    return _UNREAD.sub("", _UNREAD_TAR.sub(".tar", _UNFINISHED.sub("", name)))


def refuse_unread(folder: str, names: Sequence[str], shards: Sequence[str]) -> None:
    """Raises DataError if one of the names of a folder is that of a shard like these, or like any where there are none,
    in a form that is not read: it would be left out unseen.
    """
    suffixes = known_suffixes()
    kinds = {_kind(shard) for shard in shards}
    for name in sorted(names):
        if name.startswith(".") or not is_unread(name, suffixes):
            continue
        whole = _whole(name)
        stopped = _UNFINISHED.sub("", name)
        # What is left of a copy that was made again is no shard.
        if (kinds and _kind(whole) not in kinds) or (stopped != name and stopped in shards):
            continue
        what = (
            "is not whole, by its name: finish it or remove it"
            if stopped != name
            else f"is packed in a way that is not read here: unpack it{' or remove it' * (whole in shards)}"
        )
        pattern = f"{folder.rstrip('/')}/*{suffix_of(shards[0] if shards else whole)}"
        raise DataError(
            f"parts {folder!r}: {name!r} {what}, or name the others by a pattern, such as {pattern!r}"
        )


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
