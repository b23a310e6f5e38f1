"""Packs the fields of a batch into one host slab, so that a single copy moves them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipegraph.device.slabs import Lease, SlabRing, aligned

SMALL_SHARE = 16
"""A field under one part in this many of its slab is copied out on delivery: kept labels must not keep batches."""


@dataclass(frozen=True, slots=True)
class FieldPlace:
    """Where a tensor lies in a slab; ``offset`` and ``nbytes`` in bytes, ``strides`` in elements (None: contiguous)."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None

    def within(self, slab: torch.Tensor) -> torch.Tensor:
        """A view of the place in ``slab`` (uint8, one dimension)."""
        flat = slab[self.offset : self.offset + self.nbytes].view(self.dtype)
        if self.strides is not None:
            return flat.as_strided(self.shape, self.strides, flat.storage_offset())
        return flat if len(self.shape) == 1 else flat.view(self.shape)

    def write(self, tensor: torch.Tensor, slab: torch.Tensor) -> None:
        """Write a tensor of this dtype and shape there."""
        with torch.no_grad():
            self.within(slab).copy_(tensor)

    def moved(self, by: int) -> FieldPlace:
        """The same place, a number of bytes further."""
        return replace(self, offset=self.offset + by)

    def small_in(self, nbytes: int) -> bool:
        """Whether it is a small part of a batch of ``nbytes``."""
        return self.nbytes * SMALL_SHARE < nbytes


def packable(leaf: Any) -> bool:
    """Whether it is a plain dense tensor in host memory: others and subclasses go by themselves."""
    return (
        type(leaf) is torch.Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not leaf.is_nested
        and not leaf.is_quantized
    )


def places_for(tensors: Iterable[torch.Tensor], start: int = 0) -> tuple[list[FieldPlace], int]:
    """A place for each tensor from byte ``start`` on, at aligned offsets and in this order; and where the last ends.

    Strides of dense tensors are kept (``channels_last``).
    """
    places: list[FieldPlace] = []
    end = start
    for tensor in tensors:
        offset = aligned(end)
        end = offset + tensor.nbytes
        strides = None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        places.append(FieldPlace(offset, tensor.nbytes, tensor.dtype, tuple(tensor.shape), strides))
    return places, end


class Packed:
    """The tensors of a batch and one slab of host memory with a place for each of them.

    Large ones lie there: what is written to them is written to the slab. Small ones lie elsewhere, so that a kept one
    keeps no slab; they are written to their places when the copy is about to read these, as they are then.

    Attributes:
        nbytes: the batch takes this many bytes at the slab's beginning.
    """

    __slots__ = ("_fields", "_lease", "nbytes")

    def __init__(
        self, lease: Lease, tensors: Sequence[torch.Tensor], places: Sequence[FieldPlace], nbytes: int
    ) -> None:
        self._lease = lease  # the slab stays as it is for as long as this lives
        self._fields = {id(tensor): (tensor, place) for tensor, place in zip(tensors, places, strict=True)}
        self.nbytes = nbytes

    @property
    def memory(self) -> torch.Tensor:
        """The batch's bytes: (nbytes,) uint8."""
        return self._lease.slab[: self.nbytes]

    def places(self, tensors: Iterable[torch.Tensor]) -> list[FieldPlace] | None:
        """Where these tensors belong; None unless it knows them all."""
        found = []
        for tensor in tensors:
            known = self._fields.get(id(tensor))
            if known is None:
                return None
            found.append(known[1])
        return found

    def write_small(self) -> int:
        """Write the small tensors to their places; returns the bytes. Several readers may: the outcome is the same."""
        small = [(tensor, place) for tensor, place in self._fields.values() if place.small_in(self.nbytes)]
        for tensor, place in small:
            place.write(tensor, self._lease.slab)
        return sum(place.nbytes for _, place in small)


def pack(
    tensors: Sequence[torch.Tensor], ring: SlabRing, own: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Packed, list[torch.Tensor]]:
    """Write the large ones of some tensors into one slab.

    Args:
        tensors: plain dense ones, in host memory.
        own: gives a small tensor what memory it is to have.

    Returns:
        the batch, and its tensors in the same order: the large ones in the slab, the small ones as ``own`` made them.
    """
    places, nbytes = places_for(tensors)
    lease = ring.lend(ring.take(nbytes))
    made = _laid(lease, tensors, places, nbytes, own)
    return Packed(lease, made, places, nbytes), made


def room_behind(nbytes: int, others: Iterable[torch.Tensor]) -> int:
    """Bytes of a slab that has room for ``others`` behind what fills its first ``nbytes``."""
    return places_for(others, nbytes)[1]


def pack_behind(
    lease: Lease, first: torch.Tensor, others: Sequence[torch.Tensor]
) -> tuple[Packed | None, list[torch.Tensor]]:
    """Lay ``others`` behind ``first``, a tensor of ``lease`` that fills the slab's start.

    Returns:
        the batch of all of them, None where the slab has no room for it; and the others: large ones in the slab.
    """
    places, nbytes = places_for(others, first.nbytes)
    if nbytes > lease.slab.numel():
        return None, list(others)
    made = _laid(lease, others, places, nbytes, lambda tensor: tensor)
    place = FieldPlace(0, first.nbytes, first.dtype, tuple(first.shape), None)
    return Packed(lease, [first, *made], [place, *places], nbytes), made


def _laid(
    lease: Lease,
    tensors: Sequence[torch.Tensor],
    places: Sequence[FieldPlace],
    nbytes: int,
    own: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    made = []
    for tensor, place in zip(tensors, places, strict=True):
        if place.small_in(nbytes):
            made.append(own(tensor))
        else:
            place.write(tensor, lease.slab)
            made.append(lease.tensor(place.dtype, place.shape, place.offset, place.strides))
    return made
