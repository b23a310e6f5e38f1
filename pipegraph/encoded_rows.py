"""Samples as the bytes that their shards have of them, decoded where somebody first looks at them.

So a process that works on lines gets these, not objects that were made of them in the trainer. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from pickle import PickleBuffer
from typing import Any

Decode = Callable[[bytes, str, int], Any]
"""A module's function: the bytes of a sample, the name of their file and their offset in it, to the sample."""


class EncodedRows:
    """Several samples; what ``Columns`` is to samples of columns.

    Attributes:
        data: the bytes of each.
        places: the file of each, and its offset there.
    """

    __slots__ = ("_decode", "_owner", "data", "places")
    kind = None

    def __init__(
        self, decode: Decode, data: list[bytes], places: list[tuple[str, int]], owner: Any = None
    ) -> None:
        self._decode, self.data, self.places = decode, data, places
        self._owner = (sum(map(len, data)),) if owner is None else owner  # of all samples that came together

    def __len__(self) -> int:
        return len(self.data)

    def part(self, start: int, stop: int) -> EncodedRows:
        """Samples ``start`` to ``stop``."""
        return EncodedRows(self._decode, self.data[start:stop], self.places[start:stop], self._owner)

    def take(self, indices: Any) -> EncodedRows:
        """The samples with these int64 indices, in their order."""
        chosen = indices.tolist()
        return EncodedRows(self._decode, [self.data[i] for i in chosen], [self.places[i] for i in chosen])

    @staticmethod
    def joined(parts: Sequence[EncodedRows]) -> EncodedRows | None:
        """Several laid end to end; None where they are not of one format."""
        first = parts[0]
        if any(part._decode is not first._decode for part in parts):
            return None
        data = [each for part in parts for each in part.data]
        return EncodedRows(first._decode, data, [each for part in parts for each in part.places])

    def rows(self) -> list[Any]:
        """The samples; the first that is broken is raised."""
        decode = self._decode
        return [decode(data, *place) for data, place in zip(self.data, self.places, strict=True)]

    def buffers(self) -> tuple[tuple[int, int], ...]:
        """Their bytes, which count together."""
        return ((id(self._owner), *self._owner),)

    def __reduce__(self) -> Any:
        lengths = array("Q", map(len, self.data))
        return _received, (self._decode, PickleBuffer(b"".join(self.data)), lengths, self.places)


def _received(decode: Decode, raw: Any, lengths: Sequence[int], places: list[tuple[str, int]]) -> EncodedRows:
    """The rows, whose bytes came end to end."""
    ends, whole = [0], bytes(raw)
    for nbytes in lengths:
        ends.append(ends[-1] + nbytes)
    return EncodedRows(decode, [whole[start:stop] for start, stop in pairwise(ends)], places)
