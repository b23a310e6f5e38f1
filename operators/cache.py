"""``Cache``: a memo by source index, in memory or in a folder. Never changes what is delivered.

A file of the folder is a tree of plain values and arrays, which are never unpickled: a JSON header says how the tree is
built, and the bytes of arrays, tensors and byte strings follow it. Before them is a checksum of all that.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import warnings
from collections.abc import Callable
from operator import index as as_int
from pathlib import Path
from typing import Any, final
from zlib import crc32

import numpy as np
import torch

from pipegraph import concurrency
from pipegraph.capabilities import Memo
from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Fact
from pipegraph.engine.stage.cache_wiring import Hit
from pipegraph.errors import DataError, GraphError, PipegraphWarning, shown
from pipegraph.forks import lock_free_after_fork
from pipegraph.operators.columns import ARRAYS
from pipegraph.paths import path_of
from pipegraph.tree import buffers, bytes_of, copy_containers, map_leaves, own_memory
from pipegraph.units import parse_bytes

Value = tuple[tuple[Any, ...] | None, Any]
"""A sample's keys, None where its position is its key, and its data."""


Index = int | str | tuple[Any, ...]
"""What a source's ``index_of`` gives."""


def _plain(index: Any) -> Index:
    if isinstance(index, str):
        return index
    if isinstance(index, tuple):
        return tuple(map(_plain, index))
    try:
        return as_int(index)
    except TypeError:
        raise GraphError(
            "Cache: samples are known by the index that the source gives (index_of, or its sampler): an int, a str, or "
            f"a tuple of these; got {shown(index)}"
        ) from None


def _kept(leaf: Any) -> Any:
    """A leaf as it is kept."""
    if hasattr(type(leaf), "__next__"):
        raise GraphError(
            f"Cache: a result is or contains {shown(leaf)}, which can be read only once; return a list"
        )
    return own_memory(leaf)


class _Memory:
    """Values by (digest of what made them, index). Thread-safe, as is :class:`_Folder`.

    What is kept stays, so that a scan larger than the limit still hits.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = lock_free_after_fork()
        self._used = 0
        self._values: dict[tuple[str, Index], Value] = {}

    def get(self, digest: str, index: Index) -> Value | None:
        with self._lock:
            value = self._values.get((digest, index))
        return None if value is None else (value[0], copy_containers(value[1]))

    def put(self, digest: str, index: Index, value: Value) -> None:
        size = sum(nbytes for _, nbytes in buffers(value[1])) + 64
        with self._lock:
            if self._used + size > self._limit or (digest, index) in self._values:
                return
            self._used += size
        own = (value[0], map_leaves(_kept, value[1]))
        with self._lock:
            if self._values.setdefault((digest, index), own) is not own:
                self._used -= size  # another thread has kept it meanwhile


class _Folder:
    """A file per value, written aside and renamed: a reader sees all of it or nothing."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._lock = lock_free_after_fork()
        self._used: int | None = None
        self._said = False

    def _path(self, digest: str, index: Index) -> Path:
        if isinstance(index, int):
            return self._folder / digest / f"{index % 256:02x}" / f"{index}.pgv"
        name = hashlib.blake2b(repr(index).encode(), digest_size=16).hexdigest()
        return self._folder / digest / name[:2] / f"k{name}.pgv"

    def get(self, digest: str, index: Index) -> Value | None:
        path = self._path(digest, index)
        try:
            data = path.read_bytes()
        except OSError:  # not there, or not to be had: it is made again
            return None
        try:
            keys, value = unpack(data)
        except DataError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            with self._lock:
                said, self._said = self._said, True
            if not said:
                warnings.warn(
                    f"Cache: {path}: an entry is damaged ({error}), as by a power cut or a full disk. Such entries are "
                    "computed again; this is said once",
                    PipegraphWarning,
                    stacklevel=2,
                )
            return None
        return keys, value

    def put(self, digest: str, index: Index, value: Value) -> None:
        data = pack(value)
        with self._lock:
            if self._used is None:
                self._used = sum(file.stat().st_size for file in self._folder.rglob("*.pgv"))
            if self._used + len(data) > self._limit:
                return
            self._used += len(data)
        path = self._path(digest, index)
        aside = path.with_name(f".{path.name}.{os.getpid()}.{concurrency.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(data)
            os.replace(aside, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            self._limit = 0
            warnings.warn(
                f"Cache: {self._folder} takes no more files ({error.strerror}); continuing without adding to it",
                PipegraphWarning,
                stacklevel=2,
            )


@final
class Cache(Memo):
    """Keep results, so that later epochs take them from here and skip the stages above.

    The stages above must be a random-access source that identifies its samples (``index_of``), and one-to-one stages
    whose result depends only on their item. Functions are assumed to be such, unless they have a parameter ``rng``;
    operators declare it with ``depends_on``. If a function uses torch's random functions, that is an error when it
    happens (in worker processes it is not noticed).

    Results that do not fit into the limit are computed again in each epoch; results that are in the cache stay there.

    An entry is valid for the stages above as they are: their parameters, and the names and code of their functions.
    What these functions carry (defaults, closures, what ``functools.partial`` has bound, the object they belong to) and
    the globals that they read count too: data, objects by their public attributes, networks by their weights, and
    functions of the same module; of other modules the data that they name. Functions of other modules, and the content
    of the dataset, are not noticed. So use another folder for another dataset of the same length, or after a change
    deeper in your code. Of arrays above a megabyte and containers of more than 1000 entries, evenly spaced places are
    compared; of objects that have no public attributes and cannot be pickled (iterators, open files), the type.

    What the training loop changes in the dataset, or in what a function above reads, is not seen: make another loader
    then. A stage below must not change results in place (``x + 1``, not ``x += 1``): what is kept changes too.

    Args:
        where: ``"memory"`` (each loader has its own cache), or a folder (shared by processes, kept between runs; values
            are never unpickled, and those whose checksum does not match are computed again).
        limit: bytes, or a text such as ``"20 GB"``.

    Raises:
        GraphError: ``limit`` is not a size. At the plan: the source above is not random-access or does not identify its
            samples, or a stage between is not one-to-one, depends on more than its item, or does not declare it. While
            it runs: a stage above has used torch's random functions.

    If the folder cannot be written to, you get a warning and nothing is kept.
    """

    facts = Fact.SEEDS_ITSELF | Fact.IN_TRAINER
    name = "cache"
    needs = "sample"

    def __init__(self, where: str | os.PathLike[str], limit: int | str) -> None:
        self.limit = parse_bytes(limit, "Cache: limit")
        self.where = os.path.expanduser(path_of(where, 'Cache: where, if it is not "memory",'))
        self._store: _Memory | _Folder
        self._index_of: Callable[[int, int], Any]
        self._digest = ""

    def config(self) -> dict[str, Any]:
        return {}  # it never changes what is delivered

    def _make_store(self) -> _Memory | _Folder:
        return _Memory(self.limit) if self.where == "memory" else _Folder(Path(self.where), self.limit)

    def open(self, context: Context) -> None:
        # Of one loader: what another one's training loop does to its samples in place must not be seen here.
        self._store = context.share("memo", self._make_store)

    def attach(self, index_of: Callable[[int, int], Any], digest: str) -> None:
        """Called by the runtime: how positions become indices, and the upstream stages."""
        self._index_of, self._digest = index_of, digest

    def lookup(self, index: Any) -> Hit | None:
        """What the stages above would make of the source's sample ``index``, if it is known."""
        value = self._store.get(self._digest, _plain(index))
        return None if value is None else Hit(*value)

    def process(self, chunk: Chunk) -> Chunk:
        data = chunk.data
        if data.__class__ is Hit:
            chunk.keys, chunk.data = data.keys, data.value
            return chunk
        position = chunk.lineages[0][1]
        kept = (chunk.own_keys, data)  # another epoch has the sample at another position
        self._store.put(self._digest, _plain(self._index_of(position, chunk.epoch)), kept)
        return chunk


# -- values as bytes ---------------------------------------------------------------------------------

_MAGIC = b"pgv2"


def pack(tree: Any) -> bytes:
    """Bytes of a tree of dicts, lists, tuples, numbers, text, bytes, arrays and tensors.

    Raises:
        DataError: it holds something else; says what.
    """
    parts: list[bytes] = []
    header = json.dumps(_describe(tree, parts)).encode()
    body = [len(header).to_bytes(4, "little"), header, *parts]
    checksum = functools.reduce(lambda crc, part: crc32(part, crc), body, 0)
    return b"".join([_MAGIC, checksum.to_bytes(4, "little"), *body])


def unpack(data: bytes) -> Any:
    """The reverse of :func:`pack`.

    Raises:
        DataError: these bytes are damaged, or hold a type that this version of torch or NumPy does not know.
    """
    if data[:4] != _MAGIC or len(data) < 12:
        raise DataError("packed value: not one")
    if crc32(memoryview(data)[8:]).to_bytes(4, "little") != data[4:8]:
        raise DataError("packed value: its checksum does not match")
    end = 12 + int.from_bytes(data[8:12], "little")
    try:
        return _Reader(data, end).build(json.loads(data[12:end]))
    except (AttributeError, TypeError) as error:
        raise DataError(f"packed value: {error}") from error


def _describe(value: Any, parts: list[bytes]) -> Any:
    if value is None or value.__class__ in (bool, int, float, str):
        return value
    if value.__class__ is dict:
        if not all(isinstance(key, str) for key in value):
            raise DataError("packed value: only text keys can be kept in a folder; use where='memory'")
        return {"d": [[key, _describe(item, parts)] for key, item in value.items()]}
    if value.__class__ in (list, tuple):
        return {"l" if value.__class__ is list else "t": [_describe(item, parts) for item in value]}
    if value.__class__ is bytes:
        parts.append(value)
        return {"b": len(value)}
    # Exactly these types: a masked array is more than its bytes, and so may be a user's own.
    dense = value.__class__ is torch.Tensor and value.layout == torch.strided and not value.is_nested
    if dense and value.device.type == "cpu" and not value.is_quantized:
        parts.append(bytes_of(value).numpy().tobytes())
        return {"T": str(value.dtype).removeprefix("torch."), "s": list(value.shape)}
    own_type = isinstance(value, np.ndarray) and type(value) not in ARRAYS
    if isinstance(value, np.ndarray | np.generic) and not own_type and value.dtype.kind in "biufcUSmM":
        parts.append(np.ascontiguousarray(value).tobytes())
        return {"A": value.dtype.str, "s": list(value.shape), "g": isinstance(value, np.generic)}
    raise DataError(
        f"packed value: a {type(value).__name__} cannot be kept in a folder; use where='memory', or make it an array"
    )


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def _take(self, nbytes: int) -> bytes:
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def build(self, described: Any) -> Any:
        if described.__class__ is not dict:
            return described
        if "d" in described:
            return {key: self.build(item) for key, item in described["d"]}
        if "l" in described:
            return [self.build(item) for item in described["l"]]
        if "t" in described:
            return tuple([self.build(item) for item in described["t"]])
        if "b" in described:
            return self._take(described["b"])
        count = int(np.prod(described["s"], dtype=np.int64))
        if "T" in described:
            dtype = getattr(torch, described["T"])
            raw = bytearray(self._take(count * dtype.itemsize))
            flat = torch.frombuffer(raw, dtype=dtype) if count else torch.empty(0, dtype=dtype)
            return flat.reshape(described["s"])
        dtype = np.dtype(described["A"])
        array = np.frombuffer(self._take(count * dtype.itemsize), dtype).reshape(described["s"]).copy()
        return array[()] if described["g"] else array
