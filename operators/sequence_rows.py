"""Assigns tokens of documents to rows of fixed length: end to end, or whole documents that fit. Pure.

Both give each row with the cursor behind it. A cursor says where the oldest document lies of which something has not
left, and what of it, and of those that came after it, has: from there the same rows are made again. It holds no
tokens, so a state stays small.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipegraph.chunk import Cursor, Lineage


@dataclass(slots=True, eq=False)
class Document:
    """One sample: ``fields`` are arrays of ``count`` tokens each; the rest is as in its chunk.

    Attributes:
        left: tokens that have not left.
    """

    fields: dict[str, Any]
    count: int
    lineages: Sequence[Lineage]
    before: Cursor
    after: Cursor
    paths: tuple[tuple[int, ...], ...] | None = None
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.count


class DocumentSegment(NamedTuple):
    """Tokens ``start`` to ``stop`` of a document, which lie together in a row."""

    document: Document
    start: int
    stop: int


Filled = tuple[list[DocumentSegment], Cursor]
"""A row, and the cursor behind it."""


class EndToEnd:
    """Documents laid end to end and cut every ``length`` tokens.

    A cursor is ``(document's cursor, tokens of it that have left)``.
    """

    def __init__(self, length: int) -> None:
        self._length = self._room = length
        self._row: list[DocumentSegment] = []  # which is not full
        self._skip = 0

    def resume(self, cursor: Cursor) -> Cursor:
        """Prepare to continue at a cursor of a row; returns that of the document to begin with."""
        up, self._skip = cursor
        return up

    def oldest(self) -> Document | None:
        """Of those of which something is held."""
        return self._row[0].document if self._row else None

    def add(self, document: Document) -> Sequence[Filled]:
        """Take a document of at least one token; gives the rows that are complete now."""
        at, count, rows = min(self._skip, document.count), document.count, []
        document.left -= at
        self._skip = 0
        while at < count:
            start, at = at, min(count, at + self._room)
            self._row.append(DocumentSegment(document, start, at))
            self._room -= at - start
            if not self._room:
                rows.append((self._row, (document.after, 0) if at == count else (document.before, at)))
                self._row, self._room = [], self._length
        return rows

    def finish(self) -> Iterator[Filled]:
        """The row of what is left, which is shorter."""
        if self._row:
            yield self._row, (self._row[-1].document.after, 0)
            self._row, self._room = [], self._length


_NUMBERS = 1 << 40
"""Above the number of any piece of an epoch."""


class _Piece(NamedTuple):
    """A whole document, or one of those it was cut into; numbered in the order in which they came."""

    segment: DocumentSegment
    first: int  # the number of its document's first piece


class BestFit:
    """Whole documents, the longest that fit: the oldest of ``window`` first, then each time the longest for which there
    is room. A document longer than a row is cut into full rows and a rest, as if these were documents.

    The choice depends on nothing but what is held; so a cursor is ``(rows, oldest document's cursor, pieces from there
    on that have left)``, the last a hexadecimal number with a bit for each. As the oldest always leaves, there are few.
    """

    def __init__(self, length: int, window: int) -> None:
        self._length = length
        self._window = window
        self._held: dict[int, _Piece] = {}  # by number, the oldest first
        self._sizes: list[int] = []  # sorted: size and number in one int, of equal sizes the oldest last
        self._came = 0
        self._base = 0  # the first piece of the oldest document held
        self._left = 0  # a bit for each piece from there on
        self._gone = deque[bool]()  # of the pieces that come next: whether they had left before the restart
        self._rows = 0
        self._after: Cursor = None

    def resume(self, cursor: Cursor) -> Cursor:
        self._rows, up, left = cursor
        bits = int(left, 16)
        self._gone = deque(bool(bits >> number & 1) for number in range(bits.bit_length()))
        return up

    def oldest(self) -> Document | None:
        return next(iter(self._held.values())).segment.document if self._held else None

    def add(self, document: Document) -> Sequence[Filled]:
        """Take a document of at least one token; gives the rows that are complete now."""
        first = self._came
        for start in range(0, document.count, self._length):
            stop = min(document.count, start + self._length)
            number = self._came
            self._came += 1
            if self._gone and self._gone.popleft():
                self._left |= 1 << number - self._base
                document.left -= stop - start
                continue
            if not self._held:
                self._move_to(first)
            self._held[number] = _Piece(DocumentSegment(document, start, stop), first)
            insort(self._sizes, (stop - start) * _NUMBERS + _NUMBERS - 1 - number)
        self._after = document.after
        rows = []
        while len(self._held) >= self._window:
            rows.append(self._fill())
        return rows

    def finish(self) -> Iterator[Filled]:
        while self._held:
            yield self._fill()

    def _fill(self) -> Filled:
        number = next(iter(self._held))
        size = self._held[number].segment.stop - self._held[number].segment.start
        self._sizes.pop(bisect_right(self._sizes, size * _NUMBERS + _NUMBERS - 1 - number) - 1)
        row, room = [self._take(number)], self._length - size
        while place := bisect_right(self._sizes, room * _NUMBERS + _NUMBERS - 1):
            size, rest = divmod(self._sizes.pop(place - 1), _NUMBERS)
            row.append(self._take(_NUMBERS - 1 - rest))
            room -= size
        self._rows += 1
        if not self._held:
            self._move_to(self._came)
            return row, (self._rows, self._after, "0")
        oldest = next(iter(self._held.values()))
        self._move_to(oldest.first)
        return row, (self._rows, oldest.segment.document.before, f"{self._left:x}")

    def _take(self, number: int) -> DocumentSegment:
        self._left |= 1 << number - self._base
        return self._held.pop(number).segment

    def _move_to(self, base: int) -> None:
        self._left >>= base - self._base
        self._base = base
