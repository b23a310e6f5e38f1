"""FromTable and FromTokens: rows and tokens in memory or in mapped files."""

from __future__ import annotations

import importlib
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np
import numpy.typing as npt

from pipegraph.columns import Columns
from pipegraph.contracts import Traits
from pipegraph.errors import GraphError, extra_module
from pipegraph.integers import integer
from pipegraph.operators.load import chosen_columns
from pipegraph.operators.ordered import OrderedSource, order_of
from pipegraph.order import Order, StridedOrder
from pipegraph.paths import PATHS, path_of
from pipegraph.storage.formats.arrow_rows import ArrowRows, is_float, nulls_inside

Int64Array = npt.NDArray[np.int64]


@final
class FromTable(OrderedSource):
    """The rows of a table, as ``Load`` gives those of a Parquet shard: dicts, of types that follow from the columns'.

    Numbers and text are Python's, so that a batch of them is int64 or float64; lists of numbers or bools are NumPy
    arrays of their dtype; those of numbers lie in the table's memory and are read-only. The table is not copied: a
    mapped file stays one; only columns of ``string_view`` and ``binary_view``, of which Arrow cannot pick rows, are
    copied as ``large_string`` and ``large_binary``.
    The columns are taken as they are now; after you have changed the table, make another graph.

    A batch has no place for None. Nulls in a column of floats are NaN; a column of another type that has any, in the
    whole table, is refused: what a batch looks like never depends on which rows are in it.

    Args:
        table: of pyarrow, pandas or polars, or a map-style Hugging Face dataset, whose stored values are then read as
            they are: an image is a dict of its bytes and path.
        columns: to read; all by default.
        order: which row at which position.
        shuffle: whether the default order shuffles; by default rows come as they lie.

    Raises:
        GraphError: not a table, no such column, or nulls in a column that is not of floats.
    """

    name = "fromtable"

    def __init__(
        self,
        table: Any,
        columns: Sequence[str] | None = None,
        order: Order | None = None,
        shuffle: bool | None = None,
    ) -> None:
        super().__init__(order_of(order, shuffle, StridedOrder(shuffle=False), "FromTable"))
        found, self._picked = _arrow_table(table)
        columns = chosen_columns(columns, "FromTable")
        missing = [name for name in columns or () if name not in found.column_names]
        if missing:
            raise GraphError(
                f"FromTable: there is no column {missing[0]!r}; there are "
                f"{', '.join(map(repr, found.column_names))}"
            )
        _refuse_twice(columns or found.column_names, found.column_names)
        self.table = _takable(found if columns is None else found.select(list(columns)))
        _refuse_nulls(self.table)
        self._rows: ArrowRows | None = None

    @property
    def traits(self) -> Traits:
        return replace(super().traits, columns=True, light=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_rows": None}

    def config(self) -> dict[str, Any]:
        kinds = {field.name: str(field.type) for field in self.table.schema}
        return {"length": self.layout(), "columns": kinds, **self.order.config()}

    def layout(self) -> int:
        return self.table.num_rows if self._picked is None else len(self._picked)

    def read_into(self, found: list[Any], indices: Sequence[Any], start: int) -> None:
        rows, numbers = self._of(indices[start:])
        found += rows.rows(numbers)

    def columns(self, indices: Sequence[Any]) -> Columns | None:
        rows, numbers = self._of(indices)
        return rows.columns(numbers)

    def _of(self, indices: Sequence[int]) -> tuple[ArrowRows, Int64Array]:
        rows, numbers = self._rows, np.asarray(indices, np.int64)
        if rows is None:
            rows = self._rows = ArrowRows(self.table, "FromTable", copied=False)
        return rows, numbers if self._picked is None else self._picked[numbers]


def _arrow_table(given: Any) -> tuple[Any, Int64Array | None]:
    """The pyarrow table under what a user has, and which of its rows are meant, where not all are."""
    arrow = extra_module("pyarrow", "shards", "FromTable")
    if isinstance(given, arrow.Table):
        return given, None
    if isinstance(given, arrow.RecordBatch):
        return arrow.Table.from_batches([given]), None
    pandas, datasets = sys.modules.get("pandas"), sys.modules.get("datasets")
    if pandas is not None and isinstance(given, pandas.DataFrame):
        _refuse_twice(given.columns, list(given.columns))
        try:
            return arrow.Table.from_pandas(given, preserve_index=False), None
        except (arrow.ArrowException, TypeError, OverflowError) as error:  # most have the column's name
            said = "; ".join(map(str, error.args))
            raise GraphError(f"FromTable: {said}; give its values one type, or use FromSequence") from error
    if datasets is not None and isinstance(given, datasets.Dataset):
        if given.format["type"] == "custom":
            raise GraphError(
                "FromTable: the dataset has a transform (with_transform), and FromTable reads stored columns; use "
                "FromSequence, which calls it"
            )
        picked = given._indices
        table = given.select_columns(given.format["columns"]).data.table
        return table, None if picked is None else picked.column(0).to_numpy().astype(np.int64)
    if hasattr(given, "to_arrow"):
        return given.to_arrow(), None
    raise GraphError(
        f"FromTable: a table of pyarrow, pandas or polars, or a Hugging Face dataset is needed, got "
        f"{type(given).__name__}; use FromSequence for other datasets"
    )


def _takable(table: Any) -> Any:
    """The table, with columns of views as columns of large texts and bytes: Arrow takes no rows out of views."""
    arrow = importlib.import_module("pyarrow")
    for place, field in enumerate(table.schema):
        if (views := str(field.type)) in ("string_view", "binary_view"):
            large = arrow.large_string() if views == "string_view" else arrow.large_binary()
            table = table.set_column(place, field.with_type(large), table.column(place).cast(large))
    return table


def _refuse_twice(read: Iterable[Any], names: Sequence[Any]) -> None:
    twice = [repr(name) for name in dict.fromkeys(read) if names.count(name) > 1]
    if twice:
        raise GraphError(
            f"FromTable: the table has several columns named {', '.join(twice)}; a sample's fields need names of their "
            "own: rename them, as with table.rename_columns([...]), or leave them out"
        )


def _refuse_nulls(table: Any) -> None:
    for name, column in zip(table.column_names, table.columns, strict=True):
        inside, nulls = nulls_inside(column), 0 if is_float(column.type) else column.null_count
        if inside or nulls:
            which = f"{inside} nulls inside its lists" if inside else f"{nulls} nulls"
            raise GraphError(
                f"FromTable: column {name!r} ({column.type}) has {which}, for which a batch has no value: fill them in "
                "the table (fill_null of pyarrow.compute and polars, fillna of pandas), or leave out the rows or the "
                "column"
            )


@final
class FromTokens(OrderedSource):
    """Windows of one long array of tokens: samples ``{"tokens": int64 array (window,)}``, as embeddings take them.

    A mapped file is read in place, and crosses to worker processes as its name. Do not write to it while it is read:
    replace it (``os.replace``), since a file that is cut at that moment ends the program. Tokens behind the last whole
    window are left out. Many files, or files in a store, are read as shards: save their windows as ``.npy``.

    Args:
        tokens: a one-dimensional array or ``numpy.memmap`` of integers, or the path of a ``.npy`` or raw file.
        window: tokens per sample.
        stride: tokens between the starts of two samples; the window by default. One less than the window makes inputs
            and shifted targets from every token.
        dtype: of one token in a raw file.
        order: which window at which position.
        shuffle: whether the default order shuffles; by default windows come as they lie.

    Raises:
        GraphError: not such an array, fewer tokens than a window, a raw file without a dtype or of another one, or a
            damaged file.
    """

    name = "fromtokens"

    def __init__(
        self,
        tokens: Any,
        window: int,
        stride: int | None = None,
        dtype: npt.DTypeLike | None = None,
        order: Order | None = None,
        shuffle: bool | None = None,
    ) -> None:
        super().__init__(order_of(order, shuffle, StridedOrder(shuffle=False), "FromTokens"))
        self.window = integer(window, "FromTokens: window")
        self.stride = self.window if stride is None else integer(stride, "FromTokens: stride")
        self._tokens = _mapped(tokens, dtype) if isinstance(tokens, PATHS) else tokens
        found = self._tokens
        if isinstance(found, np.ma.MaskedArray):
            raise GraphError(
                "FromTokens: a masked array's windows would show what is masked: give .filled(0)"
            )
        if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "iu":
            facts = getattr(found, "dtype", ""), getattr(found, "shape", "")
            raise GraphError(
                "FromTokens: a one-dimensional NumPy array of integers is needed, got "
                f"{type(found).__name__} {' '.join(map(str, facts))}".rstrip()
            )
        if len(self._tokens) < window:
            raise GraphError(f"FromTokens: {len(self._tokens)} tokens hold no window of {window}")
        self._windows: Any = None  # a view of all of them, made at first use

    @property
    def traits(self) -> Traits:
        return replace(super().traits, columns=True, light=True)

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "_windows": None}
        tokens = self._tokens
        # Pickled as it is, a mapped file would be copied. What is written to a copy on write is not in the file.
        if (
            isinstance(tokens, np.memmap)
            and tokens.filename is not None
            and tokens.mode != "c"
            and isinstance(tokens.base, mmap.mmap)
        ):
            name, kind = os.fspath(tokens.filename), tokens.dtype.str
            state["_tokens"] = partial(np.memmap, name, kind, "r", tokens.offset, (len(tokens),))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if isinstance(self._tokens, partial):
            self._tokens = self._tokens()

    def config(self) -> dict[str, Any]:
        facts = {"tokens": len(self._tokens), "dtype": self._tokens.dtype.str}
        return {**facts, "window": self.window, "stride": self.stride, **self.order.config()}

    def layout(self) -> int:
        return (len(self._tokens) - self.window) // self.stride + 1

    def read_into(self, found: list[Any], indices: Sequence[Any], start: int) -> None:
        tokens, window, stride = self._tokens, self.window, self.stride
        starts = [index * stride for index in indices[start:]]
        found += [{"tokens": np.array(tokens[first : first + window], np.int64)} for first in starts]

    def columns(self, indices: Sequence[Any]) -> Columns:
        if self._windows is None:
            tokens = self._tokens.view(np.ndarray)
            step = tokens.strides[0]
            shape, strides = (self.layout(), self.window), (self.stride * step, step)
            self._windows = np.lib.stride_tricks.as_strided(tokens, shape, strides, writeable=False)
        tokens = self._windows[np.asarray(indices, np.int64)].astype(np.int64, copy=False)
        return Columns(dict, {"tokens": Columns(np.ndarray, tokens)})


def _mapped(path: Any, dtype: npt.DTypeLike | None) -> Any:
    name = path_of(path, "FromTokens: tokens")
    if not name.endswith(".npy") and dtype is None:
        raise GraphError(
            f"FromTokens: {name!r} does not say what its tokens are: give dtype=, such as 'uint16'"
        )
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise GraphError(
            f"FromTokens: dtype must be one of NumPy's, such as 'uint16', got {dtype!r}"
        ) from error
    try:
        if name.endswith(".npy"):
            return np.load(name, mmap_mode="r", allow_pickle=False)
        return np.memmap(name, kind, mode="r")
    except (ValueError, EOFError) as error:
        raise GraphError(
            f"FromTokens: {name!r} holds no array of tokens, or was cut short: {error}"
        ) from error
