"""One block from its part to a sink, as often as it takes, and no more of it than it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import final

from .checksum import crc32c_extend
from .entries import Sink

ReadPieces = Callable[[Sink, Collection[int] | None], None]
"""Reads a range in pieces to a sink: all of them, or those that start at the given offsets."""


@final
class Transfer:
    """A download that may be called again after bytes did not match: it brings again what is in doubt.

    One checksum for a block does not tell which of its pieces is wrong. So the second call brings every piece,
    and each that comes as it did before is taken for right: two transfers that are wrong in the same way are
    rarer than the fault itself. Later calls bring the others only. Should all have come twice alike and not match,
    they are brought anew.

    Args:
        read: reads the block's pieces.
    """

    def __init__(self, read: ReadPieces) -> None:
        self._read = read
        self._came: dict[
            int, list[int]
        ] = {}  # by offset, the checksums it came with; what was handed on is last
        self._sure: set[int] = set()

    def __call__(self, sink: Sink) -> None:
        in_doubt = self._came.keys() - self._sure
        if not in_doubt:
            self._came.clear()
            self._sure.clear()
        self._read(_Compared(self, sink), in_doubt or None)

    def came(self, offset: int, crc: int) -> bool:
        """Note a piece; whether it is another one than was handed on before."""
        before = self._came.setdefault(offset, [])
        if crc in before:
            self._sure.add(offset)
        if before[-1:] == [crc]:
            return False
        before.append(crc)
        return True


class _Compared:
    def __init__(self, transfer: Transfer, sink: Sink) -> None:
        self._transfer, self._sink = transfer, sink

    def write_at(self, offset: int, data: bytes) -> None:
        if self._transfer.came(offset, crc32c_extend()(0, data)):
            self._sink.write_at(offset, data)
