"""LitData's chunks, as ``litdata.optimize`` writes them, with their ``index.json``.

A chunk is a table of offsets and samples; a sample is the uint32 sizes of its leaves, then the leaves. What the leaves
are, and the tree that they make, stands only in the index. Of dicts of plain values (the default where pyarrow is
installed) the samples are empty, and behind them come an Arrow file of all rows, its uint32 length and `_ARROW`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from pipegraph.errors import DataError, ShardError
from pipegraph.paths import path_of
from pipegraph.storage.parts import file_version, is_url
from pipegraph.storage.shard_files import ShardFile

from .arrow_rows import ArrowRows, blocks_of_rows
from .offset_table import Decode, Offsets, blocks_of, raw_image, read_offsets, table_rows
from .shard_format import BLOCK_NBYTES, Block, Format, Sample

INDEX: Final = "index.json"
_MAX_INDEX_NBYTES: Final = 1 << 28
_MAX_DEPTH: Final = 64
_ARROW: Final = b"LDARW01\0"
"""The end of a chunk with an Arrow file."""

TENSOR_DTYPES: Final = (
    "float32 float32 float64 float64 complex64 complex64 complex128 complex128 float16 float16 bfloat16 "
    "uint8 int8 int16 int16 int32 int32 int64 int64 bool uint16"
).split()
"""torch's, by the number in a format or head; the order is LitData's."""

ARRAY_DTYPES: Final = (
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bool"
).split()

Decoder = Callable[[bytes], Any]


@dataclass(frozen=True)
class LitDataIndex:
    """What an index says of the samples of its chunks."""

    formats: tuple[str, ...]  # of each leaf, in the order of the tree
    tree: Any  # names and places of the leaves: a leaf's number, a list or a dict of trees
    sized: bool  # whether each sample begins with the sizes of its leaves; token chunks have one leaf without


@final
class LitDataFormat(Format):
    """LitData's ``chunk-0-0.bin``. Samples are the dicts that were optimized, with their types.

    Where samples were tuples or lists, their entries are the fields ``"0"``, ``"1"`` ...; where they were single
    values, the field is ``"data"``. JPEG, PNG and other files stay encoded, ``pil`` images are arrays. Chunks for a
    ``TokensLoader`` give each item's tokens as ``{"tokens": ...}``. Leaves that are pickled, and encrypted chunks, are
    refused.

    Args:
        index: what ``index.json`` holds, or where it is: for chunks that lie in a store. By default the file beside
            each local chunk.
    """

    suffixes = (".bin",)
    in_place = True

    def __init__(self, index: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> None:
        given: Any = index
        if index is not None and not isinstance(index, Mapping):
            given = _load_index(path_of(index, "LitDataFormat: index"))
        self._layout = None if given is None else layout_of(given, INDEX)

    def index(self, file: ShardFile, block_nbytes: int = BLOCK_NBYTES) -> Iterator[Block]:
        self._layout_for(file)
        offsets, arrow = _contents(file)
        if arrow:
            yield from blocks_of_rows(file, *arrow, len(offsets) - 1, block_nbytes)
        else:
            yield from blocks_of(offsets, block_nbytes)

    def read(self, file: ShardFile, block: Block) -> Sequence[Sample]:
        layout = self._layout_for(file)
        offsets, arrow = _contents(file)
        if arrow:
            return ArrowRows(file, *arrow, block)
        return table_rows(file, offsets, block, _decoder(layout, file.name))

    def _layout_for(self, file: ShardFile) -> LitDataIndex:
        if self._layout is not None:
            return self._layout
        if is_url(file.name):
            raise DataError(
                f"{file.name}: what LitData's chunks hold stands in their index.json; name it: "
                "register_format(LitDataFormat('s3://.../index.json')), or register a TokenFormat for files of tokens"
            )
        path = os.path.join(os.path.dirname(file.name), INDEX)
        try:
            return _layout_at(path, file_version(os.stat(path)))
        except FileNotFoundError:
            raise DataError(
                f"{file.name}: no {INDEX} beside it, so it is no chunk of LitData's; for a file of tokens say what it "
                "holds: register_format(TokenFormat('uint16', window=1025))"
            ) from None


@functools.lru_cache(maxsize=16)
def _layout_at(path: str, version: str) -> LitDataIndex:
    """What an index on disk says, parsed once for as long as the file is of one version."""
    return layout_of(_load_index(path), path)


def _contents(file: ShardFile) -> tuple[Offsets, tuple[int, int] | None]:
    """The table of offsets; and where the Arrow file with all rows begins and ends, if there is one."""
    offsets = read_offsets(file, has_more=True)
    end = int(offsets[-1])
    if end == file.size:
        return offsets, None
    tail = file.read_at(max(0, file.size - 12), min(12, file.size))
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != _ARROW or end + length + 12 != file.size:
        read_offsets(file)  # refuses it
    return offsets, (end, end + length)


def _load_index(place: str) -> Mapping[str, Any]:
    if is_url(place):
        from pipegraph.storage.stores import StoreClient  # stores import formats' contract

        with StoreClient() as client:
            text = client.read(place, 0, client.head(place).size or 0)
    else:
        if os.path.getsize(place) > _MAX_INDEX_NBYTES:
            raise ShardError(f"{place}: more than {_MAX_INDEX_NBYTES} bytes")
        with open(place, "rb") as file:
            text = file.read()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{place}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ShardError(f"{place}: not an index of LitData's")
    return found


def layout_of(index: Mapping[str, Any], name: str) -> LitDataIndex:
    """What an index says of the samples."""
    try:
        config = index["config"]
        formats = tuple(config["data_format"])
        if config.get("encryption"):
            raise DataError(f"{name}: the chunks are encrypted; write them without, or decrypt them first")
        if config.get("compression") and config.get("compression_level", "chunk") not in (None, "chunk"):
            raise DataError(
                f"{name}: the chunks are compressed {config['compression_level']} by {config['compression_level']}, "
                "which is not read here; optimize with compression_level='chunk', or without compression"
            )
        if not formats or not all(isinstance(each, str) for each in formats):
            raise ValueError("no formats of leaves")
        if config.get("item_loader") == "TokensLoader":
            return LitDataIndex(formats[:1], {"tokens": 0}, False)
        spec = config["data_spec"]
        if isinstance(spec, str):
            spec = json.loads(spec)
        numbers = iter(range(len(formats)))
        tree = _tree(spec[1] if isinstance(spec, list) else spec, numbers, 0)
        if next(numbers, None) is not None:
            raise ValueError("more leaves than its tree has places")
    except DataError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ShardError(f"{name}: not an index of LitData's: {type(error).__name__}: {error}") from error
    if isinstance(tree, list):
        tree = {str(place): each for place, each in enumerate(tree)}
    return LitDataIndex(formats, tree if isinstance(tree, dict) else {"data": tree}, True)


def _tree(spec: Any, numbers: Iterator[int], depth: int) -> Any:
    """The tree that torch's ``treespec_dumps`` describes."""
    if depth > _MAX_DEPTH:
        raise ValueError("the tree is too deep")
    kind, children = spec["type"], spec["children_spec"]
    if kind is None:
        number = next(numbers, None)
        if number is None:
            raise ValueError("fewer leaves than its tree has places")
        return number
    found = [_tree(child, numbers, depth + 1) for child in children]
    short = kind.rpartition(".")[2]
    if short in ("dict", "OrderedDict"):
        context = spec["context"]
        names = json.loads(context) if isinstance(context, str) else context
        return dict(zip(map(str, names), found, strict=True))
    if short in ("list", "tuple"):
        return found
    raise ValueError(f"a tree with a {kind!r}")


def _decoder(layout: LitDataIndex, name: str) -> Decode:
    decoders = [_leaf_decoder(form, name) for form in layout.formats]
    head = 4 * len(decoders)

    def decode(data: bytes, at: int) -> Sample:
        if layout.sized and len(data) < head:
            raise ShardError(f"{name}: a sample of {len(data)} bytes holds no {len(decoders)} sizes")
        sizes = np.frombuffer(data, "<u4", len(decoders)).tolist() if layout.sized else [len(data)]
        at = head if layout.sized else 0
        if at + sum(sizes) != len(data):
            raise ShardError(
                f"{name}: the leaves of a sample take {at + sum(sizes)} bytes, it has {len(data)}"
            )
        leaves = []
        for size, decoder, form in zip(sizes, decoders, layout.formats, strict=True):
            try:
                leaves.append(decoder(data[at : at + size]))
            except (ValueError, RuntimeError) as error:
                raise ShardError(f"{name}: a leaf of format {form!r}: {error}") from error
            at += size
        sample: Sample = _planted(layout.tree, leaves)
        return sample

    return decode


def _planted(tree: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _planted(each, leaves) for key, each in tree.items()}
    return [_planted(each, leaves) for each in tree] if isinstance(tree, list) else leaves[tree]


def _leaf_decoder(form: str, name: str) -> Decoder:
    kind, _, detail = form.partition(":")
    if kind in ("pickle", "graph"):
        raise DataError(
            f"{name}: its samples hold pickles (LitData's format {form!r}), which run code when they are read; "
            "optimize the data anew with numbers, texts, bytes, arrays or tensors"
        )
    if kind in ("no_header_tensor", "no_header_numpy"):
        values = _tensor if kind == "no_header_tensor" else _array
        dtypes = TENSOR_DTYPES if kind == "no_header_tensor" else ARRAY_DTYPES
        if not detail.isdecimal() or int(detail) >= len(dtypes):
            raise ShardError(f"{name}: the format {form!r} names no dtype")
        dtype = dtypes[int(detail)]
        return lambda data: values(data, dtype, None)
    found = _PLAIN.get(kind)
    if found is None:
        raise DataError(
            f"{name}: LitData's format {form!r} is not read here; optimize the data anew with bytes, arrays or tensors"
        )
    return found


def _count(data: bytes, dtype: str, itemsize: int, shape: Sequence[int] | None) -> int:
    """How many values there are, which is as many as the shape says."""
    count = len(data) // itemsize if shape is None else math.prod(shape)
    if count * itemsize != len(data):
        raise ValueError(
            f"{len(data)} bytes are no values of {dtype}" + (f" of shape {shape}" if shape else "")
        )
    return count


def _array(data: bytes, dtype: str, shape: Sequence[int] | None) -> Any:
    _count(data, dtype, np.dtype(dtype).itemsize, shape)
    found = np.frombuffer(data, dtype).copy()
    return found if shape is None else found.reshape(shape)


def _tensor(data: bytes, dtype: str, shape: Sequence[int] | None) -> Any:
    torch = importlib.import_module("torch")  # which other formats do without
    kind = getattr(torch, dtype)
    count = _count(data, dtype, kind.itemsize, shape)
    values = torch.frombuffer(bytearray(data), dtype=kind) if count else torch.empty(0, dtype=kind)
    return values if shape is None else values.reshape(shape)


def _with_head(
    data: bytes, order: str, dtypes: Sequence[str], values: Callable[[bytes, str, Sequence[int]], Any]
) -> Any:
    """``[dtype: 4] [dimensions: 4] [sizes: 4 each] [values]``."""
    if len(data) < 8:
        raise ValueError("an array without a head")
    number, dims = np.frombuffer(data, f"{order}u4", 2).tolist()
    if number >= len(dtypes) or 8 + 4 * dims > len(data):
        raise ValueError(f"an array says dtype {number} and {dims} dimensions")
    shape = np.frombuffer(data, f"{order}u4", dims, 8).tolist()
    return values(data[8 + 4 * dims :], dtypes[number], shape)


def _number(data: bytes, dtype: str) -> Any:
    if len(data) != np.dtype(dtype).itemsize:
        raise ValueError(f"{len(data)} bytes are no {dtype}")
    return np.frombuffer(data, dtype)[0].item()


def _images(data: bytes) -> list[bytes]:
    """``[count: 4] [sizes: 4 each] [images]``."""
    count = int.from_bytes(data[:4], "little")
    if len(data) < 4 + 4 * count or len(data) < 4:
        raise ValueError("a list of images without their sizes")
    ends = np.cumsum([4 + 4 * count, *np.frombuffer(data, "<u4", count, 4).tolist()]).tolist()
    if ends[-1] != len(data):
        raise ValueError("images that take another number of bytes")
    return [data[start:stop] for start, stop in itertools.pairwise(ends)]


_ENCODED: Final = "bytes file jpeg image tifffile tiff video audio pdf mesh nifti".split()

_PLAIN: Final[dict[str, Decoder]] = {
    "str": bytes.decode,
    "text": bytes.decode,
    "bool": lambda data: bool(_number(data, "bool")),
    "int": lambda data: _number(data, "<i8"),
    "float": lambda data: _number(data, "<f8"),
    "numpy": lambda data: _with_head(data, "<", ARRAY_DTYPES, _array),
    "tensor": lambda data: _with_head(data, ">", TENSOR_DTYPES, _tensor),
    "pil": raw_image,
    "jpeg_array": _images,
    **dict.fromkeys(_ENCODED, lambda data: data),
}
