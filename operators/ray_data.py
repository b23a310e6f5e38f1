"""A Ray Dataset as a source: its blocks lie in the cluster's memory, its rows come in an order of pipegraph's."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import numpy.typing as npt

from pipegraph.contracts import Traits
from pipegraph.errors import DataError, GraphError
from pipegraph.operators.ordered import OrderedSource, order_of
from pipegraph.order import LaneOrder, Order, StridedOrder

OPEN_BLOCKS = 32
"""Blocks that a worker keeps open: more than the lanes of the default order."""

Int64Array = npt.NDArray[np.int64]


class BlockLayout:
    """What an order needs to know of a dataset: one part per block."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.part_samples: Int64Array = np.asarray(sizes, np.int64)
        self.block_samples = self.part_samples
        self.digest = hashlib.blake2b(self.part_samples.tobytes(), digest_size=8).hexdigest()


@final
class FromRayData(OrderedSource):
    """The rows of a materialised Ray Dataset, as dicts of its columns.

    Numbers, text and bytes are Python's; tensors are NumPy arrays that lie in the object store and are read-only. A
    column of numbers with nulls is float, with NaN.

    Every rank gets the same dataset and reads its own share of it, row by row as the order deals them: no rank waits
    for another, each row is read once per epoch, and a state can be loaded at another number of ranks. Blocks are
    fetched as they come up, a few at a time.

    Args:
        dataset: ``ray.data.Dataset.materialize()``'s. One that is not materialised would be executed by every rank, and
            Ray Data's own splits between ranks differ from run to run. One made anew for a resumed run must have the
            same rows in the same blocks: set ``execution_options.preserve_order`` of Ray Data's ``DataContext`` first.
        order: which row at which position; with ``LaneOrder`` a rank reads some blocks at a time.
        shuffle: True for ``LaneOrder()``; by default rows come as they lie.

    Raises:
        GraphError: not a materialised dataset.
    """

    name = "fromraydata"

    def __init__(self, dataset: Any, order: Order | None = None, shuffle: bool | None = None) -> None:
        default = LaneOrder() if shuffle else StridedOrder(shuffle=False)
        super().__init__(order_of(order, shuffle, default, "FromRayData"))
        if type(dataset).__name__ != "MaterializedDataset":
            raise GraphError(
                f"FromRayData: got {type(dataset).__name__}: give it dataset.materialize(), once for all "
                "ranks. What does not fit into the cluster's memory and disks is read by FromIterable(lambda: "
                "dataset.iter_rows(), shard=False) from a shard of each rank, which cannot be resumed exactly"
            )
        self._refs: list[Any] = []
        self._offsets: list[int] = []
        sizes: list[int] = []
        for bundle in dataset.iter_internal_ref_bundles():
            slices = getattr(bundle, "slices", None) or [None] * len(bundle.block_refs)
            for ref, about, part in zip(bundle.block_refs, bundle.metadata, slices, strict=True):
                first, last = (0, about.num_rows) if part is None else (part.start_offset, part.end_offset)
                if last > first:
                    self._refs.append(ref)
                    self._offsets.append(first)
                    sizes.append(last - first)
        schema = dataset.schema()
        self._columns = {} if schema is None else dict(zip(schema.names, map(str, schema.types), strict=True))
        self._layout = BlockLayout(sizes)
        self._starts = np.cumsum([0, *sizes])
        self._open: OrderedDict[int, dict[str, Any]] = OrderedDict()

    @property
    def traits(self) -> Traits:
        return replace(super().traits, in_trainer=True)

    def config(self) -> dict[str, Any]:
        return {"blocks": self._layout.digest, "columns": self._columns, **self.order.config()}

    def layout(self) -> Any:
        return self._layout

    def open(self, context: Any) -> None:
        super().open(context)
        self._open = OrderedDict()  # of this worker

    def close(self) -> None:
        self._open = OrderedDict()

    def item(self, index: int) -> Any:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        columns = self._open.get(number)
        if columns is None:
            columns = self._open[number] = _columns(self._refs[number])
            if len(self._open) > OPEN_BLOCKS:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(number)
        row = index - int(self._starts[number]) + self._offsets[number]
        return {name: column[row] for name, column in columns.items()}


def _columns(ref: Any) -> dict[str, Any]:
    """The columns of a block: tensors as arrays, all else as lists of Python's values."""
    import ray
    from ray.data.block import BlockAccessor

    if not ray.is_initialized():  # it would start another cluster
        raise DataError(
            "FromRayData: the rows were in the Ray cluster, whose connection ray.shutdown() has ended; close the "
            "loader first"
        )
    arrays = BlockAccessor.for_block(ray.get(ref)).to_numpy()
    return {
        name: column.tolist() if column.ndim == 1 and column.dtype != object else column
        for name, column in arrays.items()
    }
