"""Slabs: one piece of memory for a whole batch, used again and again, and never while anybody reads it.

A slab is lent with every delivery by a *lease*: a fresh array object over its memory that owns nothing else.
The tensors of the delivery get storages of their own on top of the lease, so that every view, ``detach``,
``numpy()`` or saved tensor keeps the lease alive; when the last of them is gone the slab goes back to its ring. (A
weak reference to the tensor itself would not do: views outlive it.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]


class SlabRing:
    """The free slabs of one stage; grows when all are out, so that taking one never waits for the user.

    Any thread may take and lease. Slabs return through a ``SimpleQueue``, whose ``put`` takes no lock that
    the garbage collector could find held.

    Args:
        allocate: returns a uint8 tensor of that many bytes.
        spare: free slabs kept; more are given back to the system.
        on_return: called with a slab's memory before it is used again (tests poison it there).
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        spare: int,
        on_return: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._allocate = allocate
        self._spare = spare
        self._on_return = on_return
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._returned: SimpleQueue[_Return] = SimpleQueue()
        self._lent: set[_Return] = set()
        self.made = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A slab of at least ``nbytes`` (uint8, one dimension) that nobody reads."""
        self._collect()
        while True:
            try:
                slab = self._free.get_nowait()
            except Empty:
                break
            if slab.numel() < nbytes or self._free.qsize() >= self._spare:
                continue  # too small for today's batches, or more than are needed: let it go
            if self._on_return is not None:
                self._on_return(slab)
            return slab
        self.made += 1
        return self._allocate(nbytes)

    def _collect(self) -> None:
        """Free what has come back since."""
        while True:
            try:
                back = self._returned.get_nowait()
            except Empty:
                return
            self._lent.discard(back)
            self._free.put(back.slab)

    def give_back(self, slab: torch.Tensor) -> None:
        """A slab that was taken and never lent."""
        self._free.put(slab)

    def lend(self, slab: torch.Tensor) -> Lease:
        """Start a delivery of the slab; it returns when the last tensor made of the lease is gone."""
        return Lease(slab, self)


class _Return(weakref.ref[Any]):
    """Remembers a lent slab until the last tensor made of its lease is gone.

    Its callback is ``SimpleQueue.put`` itself: no Python code runs there, so a Ctrl-C can never arrive inside it,
    where the interpreter would print and drop it.
    """

    __slots__ = ("slab",)
    __hash__ = object.__hash__  # a reference's own hash asks its referent, and arrays have none
    slab: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return self is other


class Lease:
    """One delivery of one slab. Keep it only until its tensors are made."""

    __slots__ = ("_owner",)

    def __init__(self, slab: torch.Tensor, ring: SlabRing) -> None:
        owner: Bytes = slab.numpy()[:]
        back = _Return(owner, ring._returned.put)
        back.slab = slab
        ring._lent.add(back)
        self._owner = owner

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """A tensor over part of the slab, with a storage and a version counter of its own.

        Args:
            offset: bytes from the slab's start.
        """
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat: torch.Tensor = torch.frombuffer(self._owner, dtype=dtype, count=count, offset=offset)
        return flat.view(shape)


def pageable(nbytes: int) -> torch.Tensor:
    """Host memory as the system gives it."""
    return torch.empty(nbytes, dtype=torch.uint8)


def pinned(nbytes: int) -> torch.Tensor:
    """Page-locked host memory, which a CUDA device copies from by itself.

    PyTorch's allocator rounds such sizes up to a power of two.
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def allocator(memory: str) -> Callable[[int], torch.Tensor]:
    """How slabs of that kind are made: ``"pageable"`` or ``"pinned"``."""
    return pinned if memory == "pinned" else pageable


def array_of(slab: torch.Tensor, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A slab's start as a uint8 array to write to."""
    count = int(np.prod(shape))
    return slab.numpy()[:count].reshape(shape)
