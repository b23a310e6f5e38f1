"""Tar shards in the WebDataset convention."""

from __future__ import annotations

import io
import tarfile
from typing import Any, BinaryIO, Final

import numpy as np

from pipegraph.errors import DataError
from pipegraph.storage.formats.shard_format import MAX_FIELD_NBYTES
from pipegraph.storage.formats.tar import MAX_FIELDS, split_key, whole_number
from pipegraph.storage.formats.tarheader import ARRAY, BYTES, JSON, MAX_EXTENSION_NBYTES, TEXT

from .encoder import Encoder, Sample, array_of, as_json, number_of

_BLOCK: Final = 512
_PADDING: Final = [bytes(-n % _BLOCK) for n in range(_BLOCK)]

# POSIX.1-1988 (ustar), with the fields that differ left empty: name (100), size (12), checksum (8). What would
# tell one run from another is left out: owner, group and time of modification are 0.
_MODE: Final = b"0000444\0" + 2 * b"0000000\0"
_TIME: Final = b"00000000000\0"
_RESTS: Final = {
    note: (b"0" + bytes(100) + b"ustar\x0000" + note.ljust(64, b"\0") + 2 * b"0000000\0").ljust(356, b"\0")
    for note in (BYTES, TEXT, JSON, ARRAY)
}
_SUM: Final = sum(_MODE) + sum(_TIME) + 8 * 32
_SUMS: Final = {note: _SUM + sum(rest) for note, rest in _RESTS.items()}

Encoded = tuple[str, list[bytes], int]
"""A sample's key, the pieces of its files, and their bytes."""


def header(name: str, nbytes: int, note: bytes = BYTES) -> bytes:
    """The header of a file, with the note of its type: 512 bytes, or more for names that are long or no ASCII."""
    raw = name.encode("utf-8", "surrogateescape")
    # tarfile's own take twenty times as long, and are right for every name.
    if len(raw) > 100 or not raw.isascii():
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.uname = nbytes, 0o444, note.rstrip(b"\0").decode()
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    size = b"%011o\0" % nbytes
    checksum = b"%06o\0 " % (_SUMS[note] + sum(raw) + sum(size))
    return b"".join((raw.ljust(100, b"\0"), _MODE, size, _TIME, checksum, _RESTS[note]))


def _text(key: Any, what: str = "keys") -> str:
    """A key or a field in a file's name; bytes as the text that they are. A tar's names end at a null character."""
    try:
        text = key.decode() if isinstance(key, bytes) else str(key)
        text.encode("utf-8", "surrogateescape")
        if "\0" in text:
            raise DataError(
                f"a tar keeps {what} in the names of files, which end at a null character, as in {key!r}"
            )
    except UnicodeError as error:
        raise DataError(
            f"a tar keeps {what} in the names of files, as UTF-8, and {key!r} is none: {error}"
        ) from error
    return text


class TarEncoder(Encoder):
    """One file per field: ``KEY.FIELD``.

    bytes are written as they are, text as UTF-8, arrays as ``.npy``, numbers and other values as JSON; the header notes
    which, so that they are read as they were written. An int ``label`` becomes ``cls``, which readers turn back.
    """

    format = "tar"
    shard_name = "shard-{:06d}.tar"
    has_columns = False

    def encode(self, sample: Sample, number: int) -> Encoded:
        key = sample.get("key")
        key = f"{number:09d}" if key is None else _text(key)
        pieces: list[bytes] = []
        total = 0
        if len(sample) + ("key" not in sample) > MAX_FIELDS:
            raise DataError(
                f"sample {key!r} has {len(sample)} fields, more than the {MAX_FIELDS} that a tar's may have"
            )
        for field, value in sample.items():
            if field == "key":
                continue
            try:
                value = number_of(value)
                content, note = (value, BYTES) if value.__class__ is bytes else content_of(value)
            except (TypeError, ValueError, DataError, RuntimeError) as error:
                raise DataError(f"sample {key!r}, field {field!r}: {error}") from error
            if field == "label" and isinstance(value, int) and not isinstance(value, bool):
                field, note = "cls", BYTES
                if "cls" in sample:
                    raise DataError(
                        f"sample {key!r} has an int 'label', written as 'cls', and a field 'cls' too"
                    )
                if whole_number(content) is None:
                    raise DataError(
                        f"sample {key!r}: the label {value} is no number of 64 bits; it would be read as a text 'cls'"
                    )
            elif field == "cls" and whole_number(content) is not None:
                note = BYTES  # the label, for every reader
                if "label" in sample:
                    raise DataError(
                        f"sample {key!r} has a field 'label' and the whole number {bytes(content)!r} in 'cls', which "
                        "is read as the label too; leave out one of them, or give it another name"
                    )
            elif field == "_key":
                field = "key"
            # Of a key it is enough to look at one name.
            if not pieces or not field.isalnum() or not field.islower():
                self._check(key, field)
            nbytes = len(content)
            if nbytes > MAX_FIELD_NBYTES:
                raise DataError(
                    f"sample {key!r}, field {field!r}: {nbytes} bytes, more than the {MAX_FIELD_NBYTES} that a field "
                    "may have"
                )
            head, padding = header(f"{key}.{field}", nbytes, note), _PADDING[nbytes % _BLOCK]
            if len(head) - 2 * _BLOCK > MAX_EXTENSION_NBYTES:
                raise DataError(
                    f"sample {key[:40]!r}...: a tar keeps key and field in a file's name, which has at most "
                    f"{MAX_EXTENSION_NBYTES} bytes"
                )
            pieces += (head, content, padding)
            total += len(head) + nbytes + len(padding)
        if not pieces:
            raise DataError(f"sample {key!r} has no fields: a tar would have no trace of it")
        return key, pieces, total

    @staticmethod
    def _check(key: str, field: str) -> None:
        name = f"{key}.{_text(field, 'fields')}"
        if split_key(name) != (key, field) or name.startswith("/") or ".." in key.split("/"):
            raise DataError(
                f"a tar keeps a sample's files under KEY.FIELD, the key without a dot behind its last slash and the "
                f"field in lower case: {name!r} would be read as another one. Change it, or write parquet"
            )

    def size(self, encoded: Encoded) -> int:
        return encoded[2]

    def begin(self, file: BinaryIO) -> None:
        self._file, self.samples = file, 0
        self._key: str | None = None

    def add(self, encoded: Encoded) -> None:
        key, pieces, _ = encoded
        if key == self._key:
            raise DataError(f"two samples in a row have the key {key!r}: a tar would have them as one")
        self._key = key
        self._file.writelines(pieces)
        self.samples += 1

    def finish(self) -> None:
        self._file.write(bytes(2 * _BLOCK))  # the end of an archive


def content_of(value: Any) -> tuple[bytes, bytes]:
    """A value as a file's content, and the note of its type."""
    if value.__class__ is int:
        return b"%d" % value, JSON
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value), BYTES
    if isinstance(value, str):
        return value.encode(), TEXT
    value = array_of(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise DataError(
                "arrays of Python objects would be pickled; write their parts as fields of their own"
            )
        out = io.BytesIO()
        np.save(out, np.asarray(value, order="C"), allow_pickle=False)
        return out.getvalue(), ARRAY
    return as_json(value).encode(), JSON
