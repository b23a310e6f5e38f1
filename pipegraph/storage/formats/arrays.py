"""NumPy and token files: rows of fixed size, found by arithmetic."""

from __future__ import annotations

import ast
import io
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from pipegraph.errors import DataError, LoaderClosedError, ShardError
from pipegraph.forks import lock_free_after_fork
from pipegraph.storage.shard_files import ShardFile

from .shard_format import BLOCK_NBYTES, MAX_UNPACKED_NBYTES, Block, BlockSamples, Format, Sample

# NumPy's own bound for headers of files that are not trusted is 10 kB.
_MAX_HEADER_NBYTES: Final = 1 << 16
_parsing = lock_free_after_fork()
"""NumPy reads headers with ``ast``, which up to CPython 3.11 counts its recursion for all threads together: two at
once now and then end in "AST constructor recursion depth mismatch"."""


@dataclass(frozen=True, slots=True)
class _Header:
    data: int
    """Where the first row starts, in bytes."""
    rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def row_nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.row_shape)

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_nbytes


@final
class NpyFormat(Format):
    """``.npy``: each row of the first dimension is a sample ``{"array": row}``.

    Rows keep their dtype; those of a structured dtype are one field per name.
    Arrays of objects (pickles) and Fortran order are refused.
    """

    suffixes = (".npy",)
    in_place = True

    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        header = _npy_header(file)
        step = max(1, block_nbytes // header.row_nbytes)
        for first in range(0, header.rows, step):
            rows, nbytes = min(step, header.rows - first), header.row_nbytes
            yield Block(header.data + first * nbytes, rows * nbytes, first, rows)

    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        header = _npy_header(file)
        return _ArrayRows(file, block, header.row_nbytes, header.dtype, header.row_shape, "array")


@final
class TokenFormat(Format):
    """Raw tokens: each window is a sample ``{"tokens": array (window,)}`` of the file's dtype.

    Not registered by itself, since a ``.bin`` file does not say what it holds::

        register_format(TokenFormat("uint16", window=1025, stride=1024))

    Tokens behind the last whole window are left out.

    Args:
        dtype: of one token, as numpy names it.
        window: tokens per sample.
        stride: tokens between the starts of two samples; the window by default. One
            less than the window makes inputs and shifted targets from every token.
        header_nbytes: bytes before the first token.
    """

    in_place = True

    def __init__(
        self,
        dtype: npt.DTypeLike,
        window: int,
        *,
        stride: int | None = None,
        header_nbytes: int = 0,
        suffixes: tuple[str, ...] = (".bin",),
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.window = window
        self.stride = window if stride is None else stride
        self.header_nbytes = header_nbytes
        self.suffixes = suffixes
        if self.dtype.kind not in "iu":
            raise DataError(f"TokenFormat: dtype must be an integer type, got {self.dtype}")
        if not 1 <= self.stride <= self.window or header_nbytes < 0:
            raise DataError(
                f"TokenFormat: 1 <= stride <= window and header_nbytes >= 0 must hold, got "
                f"window={window}, stride={self.stride}, header_nbytes={header_nbytes}"
            )

    def _windows(self, file: ShardFile) -> int:
        nbytes = file.size - self.header_nbytes
        if nbytes < 0 or nbytes % self.dtype.itemsize:
            raise ShardError(
                f"{file.name}: {nbytes} bytes after a header of {self.header_nbytes} are no whole number of "
                f"{self.dtype} tokens; is the dtype right?"
            )
        return max(0, (nbytes // self.dtype.itemsize - self.window) // self.stride + 1)

    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        windows, itemsize = self._windows(file), self.dtype.itemsize
        step = max(1, block_nbytes // (self.stride * itemsize))
        for first in range(0, windows, step):
            rows = min(step, windows - first)
            # Windows that overlap a block's end lie in it whole: neighbouring blocks overlap.
            nbytes = ((rows - 1) * self.stride + self.window) * itemsize
            yield Block(self.header_nbytes + first * self.stride * itemsize, nbytes, first, rows)

    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        self._windows(file)  # what lies behind the last whole block of a broken part fails here
        step = self.stride * self.dtype.itemsize
        return _ArrayRows(file, block, step, self.dtype, (self.window,), "tokens")


@final
class NpzFormat(Format):
    """``.npz``: arrays of one length; row i of each makes sample i, fields named as the arrays.

    A part is one block and is held whole in memory while it is read.
    """

    suffixes = (".npz",)
    needs_file = False

    def samples(self, file: ShardFile) -> Iterator[Sample]:
        return iter(_Columns(_npz_arrays(file)))

    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        rows = _common_rows({name: header.rows for name, header in _npz_headers(file).items()}, file.name)
        if rows:
            yield Block(0, file.size, 0, rows)

    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        self.take_room(sum(header.nbytes for header in _npz_headers(file).values()), file.name)
        return _Columns(_npz_arrays(file))


class _ArrayRows(BlockSamples[Sample]):
    """Rows of ``shape`` that begin every ``step`` bytes; they may overlap."""

    def __init__(
        self,
        file: ShardFile,
        block: Block,
        step: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        field: str,
    ) -> None:
        self._file, self._block, self._step = file, block, step
        self._dtype, self._shape, self._field = dtype, shape, field
        self._count = math.prod(shape)
        self._row_nbytes = dtype.itemsize * self._count

    def __len__(self) -> int:
        return self._block.samples

    def run(self, start: int, stop: int) -> list[Sample]:
        # One read; each sample then owns its row.
        nbytes = (stop - 1 - start) * self._step + self._row_nbytes
        data = self._file.read_at(self._block.offset + start * self._step, nbytes)
        return [self._row(data, i * self._step) for i in range(stop - start)]

    def sample(self, index: int) -> Sample:
        return self._row(self._file.read_at(self._block.offset + index * self._step, self._row_nbytes), 0)

    def _row(self, data: bytes, offset: int) -> Sample:
        flat = np.frombuffer(data, self._dtype, self._count, offset)
        return _sample(self._field, flat.reshape(self._shape))


class _Columns(BlockSamples[Sample]):
    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._arrays = arrays
        self._rows = len(next(iter(arrays.values()), ()))
        self.nbytes = sum(array.nbytes for array in arrays.values())

    def __len__(self) -> int:
        return self._rows

    def sample(self, index: int) -> Sample:
        sample: Sample = {}
        for name, array in self._arrays.items():
            sample.update(_sample(name, np.asarray(array[index])))
        return sample


def _sample(field: str, row: npt.NDArray[Any]) -> Sample:
    """A sample that owns its values; numbers are numpy scalars."""
    if row.dtype.names is None:
        return {field: row.copy() if row.ndim else row[()]}
    return {name: row[name].copy() if row[name].ndim else row[name][()] for name in row.dtype.names}


def _npy_header(file: ShardFile) -> _Header:
    with file.open() as stream:
        return _header(stream, file.size, file.name)


def _header(stream: Any, size: int, name: str) -> _Header:
    """Parse the header at the start of `stream`, whose whole length is `size`."""
    try:
        version = np.lib.format.read_magic(stream)
        read: dict[tuple[int, int], Callable[..., Any]] = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
            (3, 0): _read_header_3,
        }
        if version not in read:
            raise ValueError(f"unknown version {version}")
        with _parsing:
            shape, fortran, dtype = read[version](stream, max_header_size=_MAX_HEADER_NBYTES)
    except (OSError, LoaderClosedError):
        raise  # the bytes could not be had
    except Exception as error:  # a header is parsed as Python source: what it may raise is anyone's guess
        raise ShardError(f"{name}: not a .npy file: {error}") from error
    if dtype.hasobject:
        raise ShardError(f"{name}: holds Python objects (a pickle), which is refused; save plain dtypes")
    if fortran and len(shape) > 1:
        raise ShardError(f"{name}: is in Fortran order; save np.ascontiguousarray(array)")
    if not shape:
        raise ShardError(f"{name}: holds a single number; rows of a first dimension are the samples")
    if min(shape) < 0:
        raise ShardError(f"{name}: says the shape {shape}")
    header = _Header(stream.tell(), shape[0], tuple(shape[1:]), dtype)
    if header.row_nbytes == 0:
        raise ShardError(f"{name}: rows of shape {header.row_shape} and type {dtype} hold no bytes")
    if header.data + header.nbytes > size:
        raise ShardError(
            f"{name}: says {shape} of {dtype}, {header.nbytes} bytes, but {size - header.data} follow"
        )
    if (rest := size - header.data - header.nbytes) > 0:
        raise ShardError(
            f"{name}: {rest} bytes follow its array, {shape} of {dtype}, as if a second one had been saved into the "
            "same file; save one array per file"
        )
    return header


def _read_header_3(stream: Any, max_header_size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """A header whose text is UTF-8, which NumPy writes for names of fields that are not Latin-1."""
    nbytes = int.from_bytes(stream.read(4), "little")
    data = stream.read(nbytes) if nbytes <= max_header_size else b""
    if len(data) != nbytes:
        raise ValueError(f"a header of {nbytes} bytes")
    facts = ast.literal_eval(data.decode())
    shape, fortran = facts["shape"], facts["fortran_order"]
    if set(facts) != {"shape", "fortran_order", "descr"} or not all(type(size) is int for size in shape):
        raise ValueError(f"a header that says {facts}")
    return tuple(shape), bool(fortran), np.lib.format.descr_to_dtype(facts["descr"])


def _npz_headers(file: ShardFile) -> dict[str, _Header]:
    return {name: header for name, header, _ in _npz_members(file, load=False)}


def _npz_arrays(file: ShardFile) -> dict[str, npt.NDArray[Any]]:
    arrays = {name: array for name, _, array in _npz_members(file, load=True)}
    _common_rows({name: len(array) for name, array in arrays.items()}, file.name)
    return arrays


def _npz_members(file: ShardFile, *, load: bool) -> Iterator[tuple[str, _Header, npt.NDArray[Any]]]:
    try:
        with zipfile.ZipFile(io.BufferedReader(file.open(), 1 << 16)) as archive:
            infos = archive.infolist()
            unpacked = sum(info.file_size for info in infos)
            if unpacked > MAX_UNPACKED_NBYTES:
                raise ShardError(
                    f"{file.name}: unpacks to {unpacked} bytes, more than the {MAX_UNPACKED_NBYTES} that an "
                    ".npz part may hold in memory; cut it into smaller parts or use .npy"
                )
            for info in infos:
                field = info.filename.removesuffix(".npy")
                if field == info.filename or "/" in field or "\\" in field or field.startswith("."):
                    raise ShardError(f"{file.name}: member {info.filename!r} is not a named array")
                where = f"{file.name}, array {field!r}"
                with archive.open(info) as stream:
                    header = _header(stream, info.file_size, where)
                    array = np.empty(0, header.dtype)
                    if load:
                        # The zip reader never gives more than `file_size`, which is bounded above.
                        data = stream.read(header.nbytes)
                        if len(data) != header.nbytes:
                            raise ShardError(f"{where}: truncated")
                        array = np.frombuffer(data, header.dtype).reshape(header.rows, *header.row_shape)
                yield field, header, array
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError) as error:
        raise ShardError(f"{file.name}: broken .npz: {error}") from error


def _common_rows(rows: Mapping[str, int], name: str) -> int:
    if len(set(rows.values())) > 1:
        raise ShardError(f"{name}: arrays of one .npz must have equal lengths, got {dict(rows)}")
    return next(iter(rows.values()), 0)
