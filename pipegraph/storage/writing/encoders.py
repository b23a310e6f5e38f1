"""How samples become shards: one encoder per format. Pure but for the file that it is given."""

from __future__ import annotations

import io
import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, ClassVar, Final

import numpy as np

from pipegraph.errors import DataError, GraphError, extra_module
from pipegraph.storage.formats.mds import SCALARS
from pipegraph.storage.formats.shard_format import MAX_FIELD_NBYTES
from pipegraph.storage.formats.tar import split_key, whole_number
from pipegraph.storage.formats.tarheader import ARRAY, BYTES, JSON, TEXT

Sample = Mapping[str, Any]

_CONVERT: Final = "convert it to numbers, text or bytes, as with .float() or .filled(0)"


class Encoder(ABC):
    """Writes shards to files, one after the other. The same samples give the same bytes.

    Attributes:
        format: the name by which users ask for it.
        shard_name: of a shard, by its number; its suffix is that of a registered format, which reads it.
        samples: written so far.
    """

    format: ClassVar[str]
    shard_name: ClassVar[str]
    samples: int = 0

    def follow(self, path: str) -> None:  # noqa: B027  most need nothing of it
        """What is written follows this shard, which was finished before a stop."""

    @abstractmethod
    def encode(self, sample: Sample, number: int) -> tuple[Any, int]:
        """What :meth:`add` takes, and the bytes that it adds to a shard, as far as that is known before the shard is
        finished; the sample's number is its key, where it has none.

        Raises:
            DataError: the format has no place for a value; names the field.
        """

    @abstractmethod
    def begin(self, file: BinaryIO) -> None:
        """A new shard begins."""

    @abstractmethod
    def add(self, encoded: Any, nbytes: int) -> None:
        """The shard's next sample, as it was encoded."""

    @abstractmethod
    def finish(self) -> None:
        """The shard ends."""


def number_of(value: Any) -> Any:
    """A tensor or array of one number, without a dimension, as that number; anything else as it is."""
    if getattr(value, "ndim", 1) or not hasattr(value, "item"):
        return value
    dtype = getattr(value, "dtype", None)
    return value if isinstance(dtype, np.dtype) and dtype.kind not in "biuf" else value.item()


def array_of(value: Any) -> Any:
    """A tensor of torch's, which is not needed to write shards, as an array of its values; anything else as it is."""
    try:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("a masked array has no values under its mask")
        if hasattr(value, "detach") and hasattr(value, "numpy"):
            return value.detach().cpu().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError) as error:  # of a tensor without a twin in NumPy
        raise TypeError(f"{error}; {_CONVERT}") from error
    return value


def as_json(value: Any) -> str:
    """JSON that is the same wherever it is made.

    Raises:
        TypeError: a value that JSON has not, or a key that it would make a text.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)
    if "{" in text:
        _check_keys([value])
    return text


def _check_keys(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, dict):
            if odd := [key for key in value if not isinstance(key, str)]:
                raise TypeError(
                    f"the key {odd[0]!r} would become a text in JSON; make it one with str(), or write a list of pairs"
                )
            _check_keys(value.values())
        elif isinstance(value, list | tuple):
            _check_keys(value)


def _plain(value: Any) -> Any:
    if (
        isinstance(value, np.generic | np.ndarray) and value.dtype.kind not in "mM"
    ):  # nanoseconds would be numbers
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in JSON; {_CONVERT}")


# -- tar in the WebDataset convention ----------------------------------------------------------------

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

Encoded = tuple[str, list[bytes]]
"""A sample's key, and the pieces of its files."""


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

    def encode(self, sample: Sample, number: int) -> tuple[Encoded, int]:
        key = sample.get("key")
        key = f"{number:09d}" if key is None else _text(key)
        pieces: list[bytes] = []
        total = 0
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
            pieces += (head, content, padding)
            total += len(head) + nbytes + len(padding)
        if not pieces:
            raise DataError(f"sample {key!r} has no fields: a tar would have no trace of it")
        return (key, pieces), total

    @staticmethod
    def _check(key: str, field: str) -> None:
        name = f"{key}.{_text(field, 'fields')}"
        if split_key(name) != (key, field) or name.startswith("/") or ".." in key.split("/"):
            raise DataError(
                f"a tar keeps a sample's files under KEY.FIELD, the key without a dot behind its last slash and the "
                f"field in lower case: {name!r} would be read as another one. Change it, or write parquet"
            )

    def begin(self, file: BinaryIO) -> None:
        self._file, self.samples = file, 0
        self._key: str | None = None

    def add(self, encoded: Encoded, nbytes: int) -> None:
        key, pieces = encoded
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


# -- Parquet, through pyarrow ------------------------------------------------------------------------

_ARRAY_DTYPES: Final = ("bool", *SCALARS)
"""Those that come back as arrays: lists of times would be read as lists."""

GROUP_NBYTES: Final = 16_000_000
"""About what a row group holds before it is encoded: readers decode whole ones."""


class ParquetEncoder(Encoder):
    """One column per field, of the type that Arrow finds for the values of the first row group. None is a null; what
    has dicts in it is JSON text.
    """

    format = "parquet"
    shard_name = "shard-{:06d}.parquet"

    def __init__(self) -> None:
        self._arrow = extra_module("pyarrow", "shards", "writing Parquet")
        self._parquet = extra_module("pyarrow.parquet", "shards", "writing Parquet", "pyarrow")
        self._schema: Any = None  # fixed with the first row group
        self._fields: list[str] = []

    def follow(self, path: str) -> None:
        self._schema = self._parquet.read_schema(path)
        self._fields = self._schema.names

    def encode(self, sample: Sample, number: int) -> tuple[list[Any], int]:
        self._fields = self._fields or list(sample)
        if not self._fields:
            raise DataError(f"sample {number} has no fields: without a column Parquet has no rows")
        odd = next((name for name in sample if name not in self._fields), None)
        missing = next((name for name in self._fields if name not in sample and name != "key"), None)
        if odd is not None or missing is not None:
            what = f"has the field {odd!r}" if odd is not None else f"lacks the field {missing!r}"
            raise DataError(
                f"sample {number} {what}, which the first one has{'' if odd is None else ' not'}; give all samples the "
                "same fields, or write tar, where they may differ"
            )
        row = [self._value(field, sample.get(field)) for field in self._fields]
        if "key" in self._fields and row[place := self._fields.index("key")] is None:
            row[place] = f"{number:09d}"
        return row, sum(map(_nbytes, row))

    @staticmethod
    def _value(field: str, value: Any) -> Any:
        try:
            value = array_of(number_of(value))
            if _holds_dict(value):
                return as_json(value)
        except TypeError as error:
            raise DataError(f"field {field!r}: {error}") from error
        if isinstance(value, np.ndarray):
            if value.dtype.newbyteorder("=").name not in _ARRAY_DTYPES:
                raise DataError(
                    f"field {field!r}: Parquet has no arrays of {value.dtype.newbyteorder('=').name}; convert them, "
                    "times with .astype('int64')"
                )
            if value.ndim != 1:
                raise DataError(
                    f"field {field!r}: Parquet keeps lists of numbers, not arrays of shape {value.shape}; write tar, "
                    "or flatten them"
                )
            # Rows wait for their group, and the loop may use its array for the next sample.
            return value.astype(value.dtype.newbyteorder("="))
        if isinstance(value, list | tuple):
            return [number_of(each) for each in value]
        return bytes(value) if isinstance(value, bytearray | memoryview) else value

    def begin(self, file: BinaryIO) -> None:
        self._file = file
        self._writer: Any = None
        self._rows: list[list[Any]] = []
        self._held = self.samples = 0

    def add(self, encoded: list[Any], nbytes: int) -> None:
        self._rows.append(encoded)
        self._held += nbytes
        self.samples += 1
        if self._held >= GROUP_NBYTES:
            self._flush()

    def _flush(self) -> None:
        columns = map(self._column, self._fields, zip(*self._rows, strict=True))
        table = self._arrow.table(dict(zip(self._fields, columns, strict=True)))
        if self._schema is None:
            self._schema = table.schema
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._file, self._schema, write_page_checksum=True)
        self._writer.write_table(table, row_group_size=len(self._rows))
        self._rows, self._held = [], 0

    def _column(self, field: str, values: Iterable[Any]) -> Any:
        kind = None if self._schema is None else self._schema.field(field).type
        found = list(values)
        if kind == self._arrow.string() or any(isinstance(value, str) for value in found):
            # Lists with dicts in them are text, and an empty one may be one of these.
            found = ["[]" if isinstance(value, list) and not value else value for value in found]
        try:
            return self._arrow.array(found, kind)
        except (self._arrow.ArrowException, OverflowError, ValueError, TypeError) as error:
            raise DataError(
                f"field {field!r}: of {len(found)} samples up to this one, a value has no place in its Parquet column"
                f"{f' ({kind})' if kind else ''}: {error}; make all values of a field alike"
            ) from error

    def finish(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()


def _holds_dict(value: Any) -> bool:
    """Whether it is a dict, or a list with one in it: Arrow would give all of them the same keys."""
    return isinstance(value, dict) or (isinstance(value, list | tuple) and any(map(_holds_dict, value)))


def _nbytes(value: Any) -> int:
    """About what a value takes."""
    if isinstance(value, str | bytes):
        return len(value)
    return 8 * len(value) if isinstance(value, list) else int(getattr(value, "nbytes", 8))


_ENCODERS: Final = {each.format: each for each in (TarEncoder, ParquetEncoder)}


def encoder_of(format: str) -> type[Encoder]:
    """The encoder of a format."""
    if format not in _ENCODERS:
        raise GraphError(f"format must be one of {', '.join(_ENCODERS)}, got {format!r}")
    return _ENCODERS[format]
