"""Segments of anonymous shared memory that two processes map, leased message by message.

A segment is an anonymous file (``memfd_create``) whose descriptor is sent over a socket. The memory is freed when the
last process that has it ends, however it ends. Nothing is left in ``/dev/shm``, whose size does not matter.

The sender owns a segment and writes to it; the receiver maps it. Every message is a *lease*: a new object over the
segment's memory, on which the message's arrays are built. When the last of these arrays is freed, the lease's number is
sent back with the next message; only then does the sender write to the segment again.
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
"""Maximum number of free segments that a sender keeps; others are returned to the system."""

Bytes = NDArray[np.uint8]


def anonymous_file(nbytes: int) -> int:
    """The descriptor of an unnamed file of ``nbytes`` zeros.

    Raises:
        OSError: no memory is left (without ``memfd_create``: no space in the temporary folder).
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
    """The size of a segment for ``nbytes``: at most 1/8 more, so that batches of varying size can share segments."""
    size = max(nbytes, SMALLEST)
    unit = max(SMALLEST, (1 << (size - 1).bit_length()) >> 3)
    return -(-size // unit) * unit


class OwnMemory(mmap.mmap):
    """Memory in which arrays came from another process: not what a script shares with processes by itself."""


class Segment:
    """A piece of anonymous memory that this process made, or whose descriptor it received."""

    __slots__ = ("fd", "memory", "nbytes", "number")

    def __init__(self, number: int, nbytes: int, fd: int | None = None) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd = anonymous_file(nbytes) if fd is None else fd
        try:
            self.memory: Bytes = np.frombuffer(OwnMemory(self.fd, nbytes), np.uint8)
        except BaseException:
            self.close()
            raise
        if fd is not None:
            self.close()

    def close(self) -> None:
        """Close the descriptor used for sending. The mapping has its own, and is freed with the last array."""
        fd, self.fd = self.fd, -1  # see Sealed.close
        if fd >= 0:
            os.close(fd)


class Arena:
    """The segments that one sender writes to. Not thread-safe.

    Attributes:
        made: segments made so far.
    """

    def __init__(self) -> None:
        self.made = 0
        self._free: list[Segment] = []
        self._all: dict[int, Segment] = {}

    def take(self, nbytes: int) -> Segment:
        """A free segment of at least ``nbytes``: the smallest that fits without waste, else a new one."""
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
        """Mark a segment as free. Returns a segment that is dropped, which the receiver must drop too."""
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
