"""A per-thread buffer, reused for every image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipegraph import concurrency

KEPT_NBYTES = 64 * 2**20
"""The most that one thread keeps: a 24 megapixel image at half its size. Larger wishes are met, not kept."""


class Scratch(concurrency.local):
    """One growing block of bytes per thread.

    A fresh block for every image costs a page fault per 4 KiB: for 3000x2000
    pixels as much time as decoding them.
    """

    def __init__(self) -> None:
        self._block: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """At least ``nbytes`` bytes of any content, valid until this thread takes again."""
        if nbytes > KEPT_NBYTES:
            return np.empty(nbytes, np.uint8)
        if self._block.nbytes < nbytes:
            self._block = np.empty(nbytes + nbytes // 4, np.uint8)
        return self._block
