"""NumPy files: rows of fixed size, found by arithmetic."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from pipegraph.errors import LoaderClosedError, ShardError
from pipegraph.forks import lock_free_after_fork
from pipegraph.storage.shard_files import ShardFile

from .shard_format import BLOCK_NBYTES, Block, Format, PlacedRows, Sample

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

    def read(self, file: ShardFile, block: Block) -> PlacedRows:
        header = _npy_header(file)
        dtype, shape, step = header.dtype, header.row_shape, header.row_nbytes

        def decode(data: bytes, name: str, at: int) -> Sample:
            """A sample that owns its values; numbers are NumPy scalars."""
            row = np.frombuffer(data, dtype).reshape(shape)
            if dtype.names is None:
                return {"array": row.copy() if row.ndim else row[()]}
            return {name: row[name].copy() if row[name].ndim else row[name][()] for name in dtype.names}

        return PlacedRows(file, block.offset, range(0, (block.samples + 1) * step, step), decode)


def array_in(content: bytes, name: str = "the array") -> npt.NDArray[Any]:
    """The array of a whole ``.npy`` file; it owns its values.

    Raises:
        ShardError: the file is broken, or holds Python objects.
    """
    stream = io.BytesIO(content)
    shape, fortran, dtype = _facts(stream, name)
    if min(shape, default=0) < 0 or stream.tell() + math.prod(shape) * dtype.itemsize != len(content):
        raise ShardError(f"{name}: says {shape} of {dtype}, but {len(content) - stream.tell()} bytes follow")
    return np.ndarray(shape, dtype, content, stream.tell(), order="F" if fortran else "C").copy()


def _facts(stream: Any, name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether it is in Fortran order, and type."""
    try:
        version = np.lib.format.read_magic(stream)
        read: dict[tuple[int, int], Callable[..., Any]] = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
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
    return shape, fortran, dtype


def _npy_header(file: ShardFile) -> _Header:
    with file.open() as stream:
        shape, fortran, dtype = _facts(stream, file.name)
        start = stream.tell()
    name = file.name
    if fortran and len(shape) > 1:
        raise ShardError(f"{name}: is in Fortran order; save np.ascontiguousarray(array)")
    if not shape:
        raise ShardError(f"{name}: holds a single number; rows of a first dimension are the samples")
    if min(shape) < 0:
        raise ShardError(f"{name}: says the shape {shape}")
    header = _Header(start, shape[0], tuple(shape[1:]), dtype)
    if header.row_nbytes == 0:
        raise ShardError(f"{name}: rows of shape {header.row_shape} and type {dtype} hold no bytes")
    nbytes, follow = header.rows * header.row_nbytes, file.size - start
    if nbytes > follow:
        raise ShardError(f"{name}: says {shape} of {dtype}, {nbytes} bytes, but {follow} follow")
    if nbytes < follow:
        raise ShardError(
            f"{name}: {follow - nbytes} bytes follow its array, {shape} of {dtype}, as if a second one had been saved "
            "into the same file; save one array per file"
        )
    return header
