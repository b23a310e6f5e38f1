"""Pack: documents of any length to rows of a fixed number of tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

import numpy as np
import torch

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Cursor, Lineage
from pipegraph.contracts import Regroup, Traits
from pipegraph.errors import DataError, GraphError, shown
from pipegraph.integers import flag, integer
from pipegraph.operators.sequence_rows import BestFit, Document, DocumentSegment, EndToEnd, Filled

TOKENS = "tokens"
"""The field of samples that are no dicts."""
BUNDLE = 64
"""Documents handed over together, where they are quick."""
AT_ONCE = 1 << 16
"""Tokens of rows that lie in one piece of memory, at most."""
SEGMENTS, POSITIONS = "segment_ids", "position_ids"


@final
class Pack(Regroup):
    """Pack documents of any length into rows of exactly ``length`` tokens.

    A document is a dict with one or more fields of one value per token, or a plain list, array or tensor (then it is
    the field ``"tokens"``). A row is a dict of tensors, each ``(length, ...)`` of its field's dtype, and of two more,
    int32 ``(length,)``: ``"segment_ids"`` are 1, 2, 3 ... for the documents in the order in which they are in the
    row, and 0 for padding; ``"position_ids"`` count from 0 in each document. All other fields are left out, and so are
    documents without tokens. Documents are packed within an epoch and a rank, in the order in which they come.

    Args:
        length: tokens per row.
        method: ``"split"`` concatenates the documents and cuts them every ``length`` tokens. All rows of an epoch
            but the last are full, and a document may be spread over several rows, in each as a segment of its own.
            ``"fit"`` keeps documents whole: it puts the oldest of ``window`` documents into a row, then each time the
            longest one that still fits, and pads the rest of the row. Only documents longer than a row are cut, into
            documents of ``length`` tokens.
        fields: the fields to pack; by default all lists of numbers, arrays and tensors with at least one dimension.
        pad: the padding, a number or a mapping from field to number; 0 for fields that the mapping lacks.
        window: the number of documents from which ``"fit"`` chooses. A larger window fills rows better.
        drop_last: leave out a row that is not full; only with ``"split"``.

    A row's lineage is that of its first document and the token at which it begins there. The rows of an epoch are the
    same for any workers and backends; a state contains no tokens. The number of rows depends on the data. The stage
    must not follow one with ``ordered=False``, and a state needs the same world size (see ``docs/resuming.md``).

    Raises:
        GraphError: an argument is out of range, or ``drop_last`` is given with ``"fit"``.
        DataError: the fields of a document have different lengths, a field has different dtypes in two documents or
            contains something other than numbers, or ``pad`` names another field.
    """

    traits = Traits(seeds_itself=True, needs_order=True, in_trainer=True, blocks=True)
    needs = "sample"

    def __init__(
        self,
        length: int,
        method: Literal["split", "fit"] = "split",
        fields: str | Sequence[str] | None = None,
        pad: float | Mapping[str, float] = 0,
        window: int = 256,
        drop_last: bool = False,
    ) -> None:
        if method not in ("split", "fit"):
            raise GraphError(f'Pack: method must be "split" or "fit", got {method!r}')
        self.length_of_row = integer(length, "Pack: length")
        self.method = method
        self.fields = (fields,) if isinstance(fields, str) else None if fields is None else tuple(fields)
        self.pad = pad
        self.window = integer(window, "Pack: window")
        self.drop_last = flag(drop_last, "Pack: drop_last")
        if self.drop_last and method == "fit":
            raise GraphError(
                'Pack: drop_last=True needs method="split", of whose rows only the last is padded; with "fit" any '
                "row may be: leave out drop_last"
            )
        if self.fields == () or not all(isinstance(name, str) for name in self.fields or ()):
            raise GraphError(f"Pack: fields must be names of fields, got {shown(fields)}")
        self.begin()

    def config(self) -> dict[str, Any]:
        return {
            "length": self.length_of_row,
            "method": self.method,
            "fields": self.fields,
            "pad": repr(self.pad),
            "window": self.window if self.method == "fit" else None,
            "drop_last": self.drop_last,
        }

    def length(self, n: int) -> int | None:
        return None

    def begin(self) -> None:
        size = self.length_of_row
        split = self.method == "split"
        self._filler: EndToEnd | BestFit = EndToEnd(size) if split else BestFit(size, self.window)
        self._last: Cursor = None
        self._count, self._zeros = np.arange(size + 1, dtype=np.int32), np.zeros(size, np.int32)
        self._padding: dict[str, Any] = {}
        self._complete: list[Filled] = []  # rows that are still to be made
        self._inside: deque[Document] = deque()
        self._failed: tuple[Exception, Chunk] | None = None
        self._epoch = 0
        self._layout: dict[str, Any] = {}  # name and dtype, of the fields of the last document
        self.spent: list[Lineage] = []

    def resume(self, cursor: Cursor) -> Cursor:
        self.begin()  # a copy of this operator shares nothing with it then
        self._last = cursor
        return self._filler.resume(cursor)

    def group_size(self, world_size: int = 1) -> int:
        return BUNDLE

    def missing(self) -> int:
        return BUNDLE

    def packing(self) -> None:
        return None

    def process(self, chunk: Chunk) -> Iterable[Chunk]:
        made: list[Chunk] = []
        self._epoch = chunk.epoch
        self._take(made, chunk.data, chunk.lineages, chunk.before, chunk.after, chunk.paths)
        return made + self._full()

    def take_bundle(self, bundle: Bundle) -> Sequence[Chunk]:
        self._raise_failed()
        made: list[Chunk] = []
        lineages = list(bundle.lineages)
        self._epoch = bundle.epoch
        for index, item in enumerate(bundle.items()):
            try:
                self._take(made, item, (lineages[index],), *bundle.place(index))
            except Exception as error:
                self._failed = error, bundle.one(index)
                made += self._full()
                if not made:  # else these come first
                    self._raise_failed()
                return made
        return made + self._full()

    def flush(self) -> Iterable[Chunk]:
        self._raise_failed()
        self._complete += self._filler.finish()
        made = self._full()
        if made and self.drop_last:
            made.pop()  # of what is left end to end there is one row, and it is not full
        self.begin()
        return made

    def _raise_failed(self) -> None:
        if self._failed is not None:
            error, chunk = self._failed
            self._failed, self.failing = None, (chunk,)
            raise error

    def _take(self, made: list[Chunk], data: Any, *place: Any) -> None:
        """Take one document, whose ``place`` is the rest of a `Document`; ``made`` gets rows that have to be made
        before it or with it."""
        found = self._like_the_last(data)
        fields, count = found or self._arrays(data)
        document = Document(fields, count, *place)
        if found is None and count:
            flat = all(array.ndim == 1 for array in fields.values())
            layout = {name: array.dtype for name, array in fields.items()} if flat else {}
            if not layout or layout != self._layout:
                made += self._full()  # it need only be like what is then held
                held = self._filler.oldest()
                if held is not None:
                    _check_alike(held, document)
                self._layout = layout
                if self.method == "fit":  # a padding that is none is refused here, not in a bundle's name
                    self._filling(document)
        self._inside.append(document)
        if count:
            self._complete += self._filler.add(document)

    def _full(self) -> list[Chunk]:
        """The rows that are complete; notes the samples that have left."""
        made: list[Chunk] = []
        if self._complete:
            rows, self._complete = self._complete, []
            step = max(1, AT_ONCE // self.length_of_row)
            for at in range(0, len(rows), step):
                made += self._rows(rows[at : at + step])
        # In the order in which they came: what is freed later than it could be is counted, never less than is held.
        while self._inside and not self._inside[0].left:
            self.spent += self._inside.popleft().lineages
        return made

    def _rows(self, rows: Sequence[Filled]) -> Iterator[Chunk]:
        """Rows of documents that are alike, in one piece of memory."""
        shape = len(rows), self.length_of_row
        segments: list[DocumentSegment] = []
        numbers, positions = [], []
        for row, _ in rows:
            short = self.length_of_row
            for document, start, stop in row:
                document.left -= stop - start
                short -= stop - start
                positions.append(self._count[: stop - start])
            segments += row
            numbers.append(self._count[1 : len(row) + 1])
            if short:
                segments.append(DocumentSegment(self._filling(row[0].document), 0, short))
                numbers.append(self._count[:1])
                positions.append(self._zeros[:short])
        made = {}
        for name, array in segments[0].document.fields.items():
            parts = [document.fields[name][start:stop] for document, start, stop in segments]
            made[name] = np.concatenate(parts).reshape(*shape, *array.shape[1:])
        made[SEGMENTS] = np.repeat(np.concatenate(numbers), list(map(len, positions))).reshape(shape)
        made[POSITIONS] = np.concatenate(positions).reshape(shape)
        names, to_tensor = tuple(made), torch.from_numpy
        for (row, after), *arrays in zip(rows, *made.values(), strict=True):
            first = row[0].document
            # One lineage, and not those of all documents: a document may lie in several rows, a row has its own place.
            lineage = (*first.lineages[0], row[0].start)
            data = dict(zip(names, map(to_tensor, arrays), strict=True))
            chunk = Chunk(data, (lineage,), self._epoch, self._last, after)
            if first.paths is not None:
                chunk.paths = first.paths[:1]
            self._last = after
            yield chunk

    def _filling(self, like: Document) -> Document:
        """A row of padding."""
        fields = {name: self._pad(name, array) for name, array in like.fields.items()}
        return Document(fields, self.length_of_row, (), None, None)

    # -- data ----------------------------------------------------------------------------------------

    def _like_the_last(self, data: Any) -> tuple[dict[str, Any], int] | None:
        """What :meth:`_arrays` gives, where that is plain: arrays with the names and dtypes of the last document."""
        layout = self._layout
        if not layout or data.__class__ is not dict or self.fields is not None:
            return None
        count = -1
        fields = {}
        for name, value in data.items():
            kind = value.__class__
            if kind is np.ndarray:
                same = (name, value.dtype) in layout.items() and value.ndim == 1
                if not same or count not in (-1, len(value)):
                    return None
                count = len(value)
                fields[name] = value
            elif kind not in _SINGLE:
                return None
        return (fields, count) if len(fields) == len(layout) else None

    def _arrays(self, data: Any) -> tuple[dict[str, Any], int]:
        """The fields of a document as arrays, and how many tokens each has."""
        fields: dict[str, Any] = {}
        if not isinstance(data, Mapping):
            fields[TOKENS] = _array(data, TOKENS)
        elif self.fields is None:
            fields = {name: _array(value, name) for name, value in data.items() if _is_sequence(value)}
        else:
            for name in self.fields:
                if name not in data:
                    raise DataError(f"Pack: no field {name!r} in {', '.join(map(str, data))}")
                fields[name] = _array(data[name], name)
        unknown = [name for name in self.pad if name not in fields] if isinstance(self.pad, Mapping) else []
        if unknown:
            raise DataError(
                f"Pack: pad names {unknown[0]!r}, which is not packed: {', '.join(map(str, fields))}"
            )
        if not fields:
            raise DataError(
                "Pack: no field with a value per token (a list of numbers, an array or a tensor) in "
                f"{', '.join(map(str, data))}"
            )
        count = -1
        for name, array in fields.items():
            if name in (SEGMENTS, POSITIONS):
                raise DataError(
                    f"Pack: field {name!r} is one that Pack makes; rename it, or name fields= to pack"
                )
            if count not in (-1, len(array)):
                one = next(iter(fields))
                raise DataError(
                    f"Pack: field {one!r} has {count} values and field {name!r} has {len(array)}; fields that are "
                    "packed have one per token: name these with fields=[...]"
                )
            count = len(array)
        return fields, count

    def _pad(self, name: str, array: Any) -> Any:
        """``length`` entries of padding for a field; the fields of all documents that are held are alike."""
        block = self._padding.get(name)
        if block is None or block.dtype != array.dtype or block.shape[1:] != array.shape[1:]:
            value = self.pad.get(name, 0) if isinstance(self.pad, Mapping) else self.pad
            try:
                with np.errstate(invalid="ignore"):  # NaN among ints is refused below
                    block = np.full((self.length_of_row, *array.shape[1:]), value, array.dtype)
                fits = array.dtype.kind not in "biu" or bool((block[:1] == value).all())
            except (TypeError, ValueError, OverflowError):
                fits = False
            if not fits:
                raise DataError(
                    f"Pack: pad={value!r} is no {array.dtype}, as the values of field {name!r} are"
                )
            self._padding[name] = block
        return block


_SINGLE = frozenset((int, float, bool, str, bytes))
"""Types of values that are no sequence of numbers."""


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.ndim > 0
    return isinstance(value, list) and (not value or isinstance(value[0], int | float | np.number | np.bool_))


def _array(value: Any, name: str) -> Any:
    """A field as an array; the dtype of a list follows from the types of its entries."""
    if isinstance(value, torch.Tensor):
        found = value.detach().cpu().numpy()
    else:
        found = np.asarray(value, np.int64 if isinstance(value, list) and not value else None)
    if found.ndim < 1 or found.dtype.kind not in "biufc":
        raise DataError(
            f"Pack: field {name!r} must be a list of numbers, an array or a tensor with a value per token, got "
            f"{type(value).__name__}{f' of {value.dtype}' if hasattr(value, 'dtype') else ''}"
        )
    # Of one dtype for torch, which knows no foreign byte order.
    return found if found.dtype.isnative else found.astype(found.dtype.newbyteorder("="))


def _check_alike(one: Document, other: Document) -> None:
    if one.fields.keys() != other.fields.keys():
        raise DataError(
            f"Pack: documents that meet in a row must have the same fields, got {', '.join(one.fields)} and "
            f"{', '.join(other.fields)}; name those to pack with fields=[...]"
        )
    for name, array in one.fields.items():
        found = other.fields[name]
        if found.dtype != array.dtype or found.shape[1:] != array.shape[1:]:
            raise DataError(
                f"Pack: field {name!r} holds {array.dtype} of shape {array.shape} in one document and {found.dtype} of "
                f"shape {found.shape} in another; give all documents one dtype with a Map before Pack"
            )
