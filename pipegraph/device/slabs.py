"""Slabs: host memory for whole batches, reused, and never while anybody reads it.

A slab is lent with every delivery by a *lease*: a fresh storage over its memory. The tensors of the delivery get
storages of their own, cut from the lease's, so that every view, ``detach``, ``numpy()`` or saved tensor keeps the lease
alive; when the last of them is gone the slab goes back to its ring. (A weak reference to the tensor itself would not
do: views outlive it.) Torch cuts storages of all devices whose memory has addresses.

Pinned memory that leaves the graph is not lent: a user's ``to(device, non_blocking=True)`` reads it after the batch is
gone, and only torch's own allocator knows until when.

On a device the last tensor may be gone for the host while work of a stream still reads it. So a lease notes the
streams that read it, and the next writer of the slab waits for them on its own stream.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from pipegraph import concurrency

if TYPE_CHECKING:
    from pipegraph.device.backend import Event, Stream

ALIGNMENT = 64
"""Bytes: a cache line, and what vector instructions and the copy engines like best."""

SPARE_SLABS = 16
"""Free slabs a stage's ring keeps; what a user held and gave back beyond these goes to the system."""

PER_ALLOCATION = 4
"""Pinned slabs cut from one allocation, at most."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to whole units of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class SlabRing:
    """The free slabs of one stage; grows when all are out, so that taking one never waits for the user.

    Taking and leasing are thread-safe.

    Args:
        allocate: returns a uint8 tensor of at least that many bytes; what is large enough for several slabs is cut.
        spare: free slabs kept; more are given back to the system.
        count: called with ``slabs_made`` and of ``slab_bytes``, which were allocated for them, with what is rounded up.
        reused: whether slabs come back; else each is what ``allocate`` gave, and torch's allocator reuses it.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        spare: int,
        count: Callable[[str, int], None] = lambda name, n: None,
        reused: bool = True,
    ) -> None:
        self._allocate = allocate
        self._reused = reused
        self._count = count
        self._spare = spare
        self._free: concurrency.SimpleQueue[tuple[torch.Tensor, list[Event]]] = concurrency.SimpleQueue()
        self._loans: Loans[tuple[torch.Tensor, list[Stream]]] = Loans()

    def take(self, nbytes: int, writer: Stream | None = None) -> torch.Tensor:
        """A slab of at least ``nbytes`` (uint8, one dimension) that nobody reads.

        Args:
            writer: the stream that will write to it, which is made to wait for streams that read it still. Without
                one the calling thread is the writer, and nobody's stream may have read it.
        """
        for slab, readers in self._loans.returned():
            self._free.put((slab, [stream.record_event() for stream in readers]))
        while True:
            try:
                slab, readers_done = self._free.get_nowait()
            except concurrency.Empty:
                break
            if slab.numel() < nbytes or self._free.qsize() >= self._spare:
                continue  # too small for today's batches, or more than are needed: let it go
            if writer is not None:
                for event in readers_done:
                    writer.wait_event(event)
            return slab
        memory = self._allocate(nbytes)
        if not self._reused:
            return memory
        size = aligned(max(nbytes, 1))
        count = max(1, memory.numel() // size)
        self._count("slabs_made", count)
        self._count("slab_bytes", power_of_two(memory.numel()) if memory.is_pinned() else memory.numel())
        for start in range(size, count * size, size):
            self._free.put((memory[start : start + size], []))
        return memory[:size] if count > 1 else memory

    def lend(self, slab: torch.Tensor) -> Lease:
        """Start a delivery of the slab; it returns when the last tensor made of the lease is gone."""
        return Lease(slab, self._loans if self._reused else None)


class Lease:
    """One delivery of one slab. Keep it only until its tensors are made, or for as long as the slab is read.

    Attributes:
        slab: the memory.
        readers: streams that read tensors of this lease; the code that starts a read appends its stream.
    """

    __slots__ = ("_owner", "readers", "slab")

    def __init__(self, slab: torch.Tensor, loans: Loans[tuple[torch.Tensor, list[Stream]]] | None) -> None:
        self.slab = slab
        self.readers: list[Stream] = []
        self._owner: Any = None
        if loans is not None:
            start = slab.storage_offset()
            self._owner = slab.untyped_storage()[start : start + slab.numel()]
            loans.lend(self._owner, (slab, self.readers))

    def tensor(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A tensor over part of the slab, with a storage and a version counter of its own.

        Args:
            offset: bytes from the slab's start.
            strides: in elements, of a dense tensor; None is contiguous.
        """
        count = math.prod(shape)
        tensor = torch.empty(0 if count else shape, dtype=dtype, device=self.slab.device)
        if count == 0:
            return tensor
        if strides is None:
            strides = tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1] if shape else ()
        nbytes = count * dtype.itemsize
        if self._owner is None:
            flat = self.slab[offset : offset + nbytes].view(dtype)
            return flat.as_strided(shape, strides, flat.storage_offset()).data
        storage: Any = self._owner[offset : offset + nbytes]
        storage.readers = self.readers  # found through any view of the tensor by the code that starts a read
        return tensor.set_(storage, 0, shape, strides).data


def pageable(nbytes: int) -> torch.Tensor:
    """Host memory as the system gives it."""
    return torch.empty(nbytes, dtype=torch.uint8)


def on_device(device: torch.device | None) -> AbstractContextManager[object]:
    """Make an accelerator the calling thread's current one inside a ``with``; None changes nothing.

    Who pins memory in a thread that never chose a device makes a context on device 0.
    """
    return nullcontext() if device is None else torch.accelerator.device_index(device.index)


def pinned(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Page-locked host memory, which an accelerator copies from by itself; enough for one slab or a few.

    PyTorch's allocator rounds such sizes up to a power of two: as many slabs are asked for as fill that best.
    """
    return delivered(slabs_together(nbytes) * aligned(nbytes), device)


def delivered(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Page-locked host memory for one batch."""
    with on_device(device):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def slabs_together(nbytes: int) -> int:
    """How many slabs of that size waste the least when the allocation is rounded up to a power of two.

    >>> [slabs_together(mib << 20) for mib in (64, 38, 17)]
    [1, 3, 3]
    """
    size = aligned(max(nbytes, 1))
    return min(range(1, PER_ALLOCATION + 1), key=lambda n: (power_of_two(n * size) / n, n))


def power_of_two(nbytes: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(nbytes - 1, 0).bit_length()


def ring_for(
    memory: str,
    count: Callable[[str, int], None],
    device: torch.device | None = None,
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> SlabRing:
    """The slabs of a stage.

    Args:
        memory: ``"pinned"`` for slabs that copies alone read, ``"delivered"`` for pinned ones that leave the graph,
            ``"pageable"`` and ``"staged"`` (for a copy on the CPU).
        device: for which it is pinned.
        allocate: in place of what ``memory`` says.
    """
    reused = memory != "delivered" or allocate is not None
    kinds: dict[str, Callable[[int], torch.Tensor]] = {
        "pinned": partial(pinned, device=device),
        "delivered": partial(delivered, device=device),
    }
    return SlabRing(allocate or kinds.get(memory, pageable), SPARE_SLABS, count=count, reused=reused)


T = TypeVar("T")


class _Return(weakref.ref[Any]):
    """Remembers what was lent until its owner is gone.

    Its callback is ``SimpleQueue.put`` itself: no Python code runs there, so a Ctrl-C can never arrive inside it,
    where the interpreter would print and drop it, and no lock is taken that the garbage collector could find held.
    """

    __slots__ = ("lent",)
    __hash__ = object.__hash__  # a reference's own hash asks its referent, and arrays have none
    lent: Any

    def __eq__(self, other: object) -> bool:
        return self is other


class Loans(Generic[T]):
    """What was lent and has not come back. Thread-safe."""

    def __init__(self) -> None:
        self._returned: concurrency.SimpleQueue[_Return] = concurrency.SimpleQueue()
        self._lent: set[_Return] = set()

    def lend(self, owner: Any, what: T) -> None:
        """``what`` comes back when ``owner`` is gone, and with it all that keeps it."""
        back = _Return(owner, self._returned.put)
        back.lent = what
        self._lent.add(back)

    def returned(self) -> Iterator[T]:
        """What has come back since, each once."""
        while True:
            try:
                back = self._returned.get_nowait()
            except concurrency.Empty:
                return
            self._lent.discard(back)
            yield back.lent
