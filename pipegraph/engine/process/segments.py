"""Anonymous shared memory: segments that two processes map, lent message by message.

A segment is an anonymous file (``memfd_create``): its descriptor travels over a socket, and when the last process
that has it is gone, so is the memory, however that process ended. Nothing is left in ``/dev/shm``, whose size does not
matter.

The sender owns a segment and writes to it; the receiver maps it and *lends* it out: every message is a *lease*, a
fresh object over the segment's memory on which the arrays of the message are built. When the last of them is gone, the
lease's number is sent back with the next message, and only then does the sender write to the segment again.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
from numpy.typing import NDArray

SMALLEST = 1 << 16
"""Bytes of the smallest segment."""

SPARE = 16
"""Free segments that a sender keeps; beyond these they are given back to the system."""

Bytes = NDArray[np.uint8]


def anonymous_file(nbytes: int) -> int:
    """The descriptor of a file of ``nbytes`` zeros without a name.

    Raises:
        OSError: no memory (or, where there is no ``memfd_create``, no space in the temporary folder) is left.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("pipegraph", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def rounded(nbytes: int) -> int:
    """The size of a segment for ``nbytes``: an eighth more at most, so that batches of varying size share segments."""
    size = max(nbytes, SMALLEST)
    unit = max(SMALLEST, (1 << (size - 1).bit_length()) >> 3)
    return -(-size // unit) * unit


class Segment:
    """One anonymous piece of memory that this process made, or that it was sent the descriptor of."""

    __slots__ = ("fd", "memory", "nbytes", "number")

    def __init__(self, number: int, nbytes: int, fd: int | None = None) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd = anonymous_file(nbytes) if fd is None else fd
        try:
            self.memory: Bytes = np.frombuffer(mmap.mmap(self.fd, nbytes), np.uint8)
        except BaseException:
            self.close()
            raise
        if fd is not None:
            self.close()

    def close(self) -> None:
        """Close the descriptor that was for sending. The memory has one of its own, and goes with the last array."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Arena:
    """The segments that one sender writes to. One thread at a time.

    Attributes:
        made: segments made so far.
    """

    def __init__(self) -> None:
        self.made = 0
        self._free: list[Segment] = []
        self._all: dict[int, Segment] = {}

    def take(self, nbytes: int) -> Segment:
        """A segment of at least ``nbytes`` that nobody reads: the smallest that fits without waste, else a new one."""
        size = rounded(nbytes)
        fitting = [each for each in self._free if size <= each.nbytes <= 2 * size]
        if fitting:
            found = min(fitting, key=lambda each: each.nbytes)
            self._free.remove(found)
            return found
        segment = Segment(self.made, size)
        self.made += 1
        self._all[segment.number] = segment
        return segment

    def give_back(self, segment: Segment) -> Segment | None:
        """Nobody reads it any more. Returns a segment that is not kept, which the receiver should forget too."""
        self._free.append(segment)
        if len(self._free) <= SPARE:
            return None
        oldest = self._free.pop(0)
        del self._all[oldest.number]
        oldest.close()
        return oldest

    def close(self) -> None:
        for segment in self._all.values():
            segment.close()
        self._all.clear()
        self._free.clear()
