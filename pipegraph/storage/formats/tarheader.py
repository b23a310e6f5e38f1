"""Tar headers: POSIX.1-2001 (pax), POSIX.1-1988 (ustar), GNU and V7.

Our own parser, since `tarfile` builds an object of thirty attributes for every
member. Field positions are those of POSIX.1-2001 "pax" and of GNU tar's manual, section "Basic Tar Format".
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from pipegraph.errors import ShardError

from .arrays import array_in

NOTE: Final = slice(265, 281)
"""Its place in a header: the first half of ``uname``."""
BYTES: Final = bytes(16)
TEXT: Final = b"pipegraph.text\0\0"
JSON: Final = b"pipegraph.json\0\0"
ARRAY: Final = b"pipegraph.npy\0\0\0"

DECODERS: Final[Mapping[bytes, Callable[[bytes], Any]]] = {
    TEXT: bytes.decode,
    JSON: json.loads,
    ARRAY: array_in,
}
"""By note; they raise ValueError, RecursionError or ShardError."""


HEADER_NBYTES: Final = 512
ZERO_HEADER: Final = bytes(HEADER_NBYTES)

_REST_NBYTES: Final = 1 << 16

# Names and pax records: real ones are below 10 kB. Checked before they are read.
MAX_EXTENSION_NBYTES: Final = 1 << 20

_REGULAR: Final = frozenset(b"07\0")
_SKIPPED: Final = {ord("5"): "folder", ord("V"): "volume label"}
_REFUSED: Final = {
    ord("1"): "a hard link (GNU tar: --hard-dereference stores the file)",
    ord("2"): "a symbolic link (GNU tar: --dereference stores the file)",
    ord("3"): "a character device",
    ord("4"): "a block device",
    ord("6"): "a pipe",
    ord("S"): "a sparse file (GNU tar: leave out --sparse)",
}

Read = Callable[[int, int], bytes]


# Name, start of its first header (extensions included), start of its data, size, and the note of its type;
# a plain tuple: a named one costs a tenth of the whole walk.
Member = tuple[str, int, int, int, bytes]


def members(read: Read, start: int, stop: int, file_name: str, *, marker: bool) -> Iterator[Member]:
    """The regular files between two member boundaries: a `Member` each.

    Folders and volume labels are passed over. The walk ends at a zero block or at `stop`. With ``marker`` that is the
    archive's end, so the zero block must be there: without it a shard cut short between two members would lose samples
    unseen.

    Raises:
        ShardError: a broken header, a member that runs past `stop`, a link, device, pipe or sparse file, or a path that
            is absolute or has "..".
    """
    # Headers of one shard differ little: each checksum field is looked at once.
    sums: dict[bytes, int] = {}
    adler32 = zlib.adler32
    offset = header_offset = start
    long_name: str | None = None
    long_size: int | None = None
    while offset < stop:
        if stop - offset < HEADER_NBYTES:
            raise ShardError(f"{file_name}: truncated: {stop - offset} bytes of a tar header at {offset}")
        header = read(offset, HEADER_NBYTES)
        sum_field = header[148:156]
        low = sums.get(sum_field)
        if low is None:
            if len(sums) > 4096:
                sums.clear()
            low = sums[sum_field] = _adler_low(sum_field)
        if adler32(header) & 0xFFFF != low:
            if header == ZERO_HEADER:
                if marker:
                    _check_rest(read, offset, stop, file_name)
                return
            raise ShardError(f"{file_name}: not a tar header at byte {offset}: its checksum does not match")
        try:
            size = int(header[124:136].strip(b" \0"), 8)
        except ValueError:
            size = _unusual_size(header[124:136], file_name, offset)
        if size < 0:
            raise ShardError(f"{file_name}: tar header at byte {offset} has the negative size {size}")
        kind = header[156]
        data = offset + HEADER_NBYTES
        if kind in _REGULAR:
            if long_size is not None:
                size = long_size
            if long_name is not None:
                name = long_name
            elif header[345] or header[99]:
                name = _name(header)
            else:
                name = header[: header.index(0)].decode("utf-8", "surrogateescape")
            end = data + size
            if end > stop:
                raise ShardError(
                    f"{file_name}: truncated: member {name!r} at byte {offset} says {size} bytes, "
                    f"but only {stop - data} follow"
                )
            offset = end + (-size & 511)
            if name[-1:] != "/":  # V7 marks folders so
                if ".." in name or name[:1] == "/" or long_name is not None:
                    _check_path(name, file_name, header_offset)
                yield name, header_offset, data, size, header[NOTE]
            header_offset = offset
            long_name = long_size = None
            continue
        if kind in b"xXgLK":
            if size > MAX_EXTENSION_NBYTES or data + size > stop:
                raise ShardError(
                    f"{file_name}: tar extension header at byte {offset} says {size} bytes; "
                    f"at most {min(MAX_EXTENSION_NBYTES, stop - data)} are accepted"
                )
            body = read(data, size)
            if kind == 76:  # L: the next member's name
                long_name = _text(body.partition(b"\0")[0])
            elif kind != 75:  # K is a link's target: the link itself is refused
                name_, size_ = _pax(body, file_name, offset)
                if kind == 103 and (name_ is not None or size_ is not None):
                    raise ShardError(f"{file_name}: global pax header at byte {offset} sets a path or size")
                long_name = name_ if name_ is not None else long_name
                long_size = size_ if size_ is not None else long_size
        elif kind in _SKIPPED:
            header_offset = data + size + (-size & 511)
            long_name = long_size = None
        else:
            what = _REFUSED.get(kind, f"of unknown type {chr(kind)!r}")
            name = long_name if long_name is not None else _name(header)
            raise ShardError(
                f"{file_name}: member {name!r} at byte {offset} is {what}; shards hold plain files"
            )
        offset = data + size + (-size & 511)
    if marker or offset > stop:
        raise ShardError(f"{file_name}: truncated: no end-of-archive marker before its end at byte {stop}")


def _check_rest(read: Read, start: int, stop: int, file_name: str) -> None:
    """Raise ShardError unless nothing but padding follows: archives laid end to end would lose samples unseen."""
    for offset in range(start, stop, _REST_NBYTES):
        rest = read(offset, min(_REST_NBYTES, stop - offset))
        if rest.count(0) != len(rest):
            raise ShardError(
                f"{file_name}: more follows behind the end-of-archive marker at byte {start}: archives that were "
                "concatenated; join them with `tar --concatenate`, which removes the markers between them"
            )


def _adler_low(sum_field: bytes) -> int:
    """The low half of the adler32 of a header with this checksum field; -1 if none has it.

    That half is 1 + the sum of the bytes, modulo 65521, at C speed; the checksum has its own field as spaces.
    """
    try:
        wanted = int(sum_field.strip(b" \0"), 8)
    except ValueError:
        return -1
    return (1 + wanted - 8 * 32 + sum(sum_field)) % 65521


def _unusual_size(field: bytes, file_name: str, offset: int) -> int:
    if field[0] == 0x80:  # GNU: base 256, 0xFF for negative ones
        return int.from_bytes(field[1:], "big")
    if not field.strip(b" \0"):
        return 0
    raise ShardError(f"{file_name}: tar header at byte {offset} has the size {field!r}")


def _name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    # Only POSIX has a prefix there; GNU ("ustar  ") keeps times in its place.
    if header[345] and header[257:263] == b"ustar\0":
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return _text(name)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _check_path(name: str, file_name: str, offset: int) -> None:
    # Nothing is ever written under such a name; but keys travel on to users
    # who may well do so.
    if name.startswith("/") or (".." in name and ".." in name.split("/")) or "\0" in name:
        raise ShardError(
            f"{file_name}: member {name!r} at byte {offset}: absolute paths and '..' are refused in shards"
        )


def _pax(body: bytes, file_name: str, offset: int) -> tuple[str | None, int | None]:
    """Path and size from records ``"<length> <key>=<value>\\n"``."""
    name: str | None = None
    size: int | None = None
    at = 0
    try:
        while at < len(body):
            space = body.index(b" ", at, at + 10)
            length = int(body[at:space])
            record = body[space + 1 : at + length]
            if length <= space - at or at + length > len(body) or record[-1:] != b"\n":
                raise ValueError
            key, value = record[:-1].split(b"=", 1)
            if key == b"path":
                name = _text(value)
            elif key == b"size":
                size = int(value)
                if size < 0:
                    raise ValueError
            elif key.startswith(b"GNU.sparse."):
                raise ShardError(f"{file_name}: the member at byte {offset} is {_REFUSED[ord('S')]}")
            at += length
    except ValueError as error:
        if isinstance(error, ShardError):
            raise
        raise ShardError(f"{file_name}: malformed pax record in the header at byte {offset}") from None
    return name, size
