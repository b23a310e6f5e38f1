"""The slabs that a stage writes its batches to, and their counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context
from pipegraph.device.packed_copy import pack_behind, packable, room_behind
from pipegraph.device.slabs import Lease, SlabRing, ring_for
from pipegraph.tree import leaves, map_leaves


class StageSlabs:
    """One worker's access to the ring that all workers of its stage share.

    Where copies to a device alone read the stage's batches (``context.memory`` is ``"pinned"`` or ``"staged"``), the
    tensors that ride along are laid behind the ones that the stage makes, so that the copy is one.

    Counted: ``slabs_made``, their ``slab_bytes``, and ``bytes_written`` to them.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ring: SlabRing = context.share(
            "slabs",
            lambda: ring_for(context.memory, context.count, context.device, context.allocate),
        )
        self._packs = context.memory in ("pinned", "staged")

    def take(self, nbytes: int, riding: Any) -> torch.Tensor:
        """A slab (uint8, one dimension) with room for ``nbytes``, and behind them for the tensors of ``riding``."""
        room = room_behind(nbytes, tensors_of(riding, packable)) if self._packs else nbytes
        return self._ring.take(room)

    def deliver(
        self, slab: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, Lease]:
        """The tensor that the stage has written at the slab's start; the slab returns when nobody holds it any more."""
        lease = self._ring.lend(slab)
        made = lease.tensor(dtype, shape)
        self._context.count("bytes_written", made.nbytes)
        return made, lease

    def pack(self, chunk: Chunk, lease: Lease, made: torch.Tensor) -> None:
        """Lay the other tensors of ``chunk`` behind ``made`` where a copy reads them."""
        if not self._packs:
            return
        others = [tensor for tensor in tensors_of(chunk.data, packable) if tensor is not made]
        chunk.packed, laid = pack_behind(lease, made, others)
        moved = sum(new.nbytes for old, new in zip(others, laid, strict=True) if old is not new)
        if moved:
            self._context.count("bytes_written", moved)
            chunk.data = exchanged(chunk.data, others, laid)


def tensors_of(data: Any, wanted: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """The tensors of a tree for which ``wanted`` is true, each once."""
    found = {id(leaf): leaf for leaf in leaves(data) if isinstance(leaf, torch.Tensor) and wanted(leaf)}
    return list(found.values())


def exchanged(data: Any, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> Any:
    """The tree with some of its tensors replaced."""
    by_id = {id(tensor): other for tensor, other in zip(old, new, strict=True)}
    return map_leaves(lambda leaf: by_id.get(id(leaf), leaf), data)
