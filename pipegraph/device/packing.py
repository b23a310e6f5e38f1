"""Many fields of a batch in one slab of host memory, so that one copy takes all of them to a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipegraph.device.slabs import Lease, SlabRing, aligned

SMALL_SHARE = 16
"""A field under one part in this many of its slab is copied out on delivery: kept labels must not keep batches."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a slab; ``offset`` and ``nbytes`` in bytes, ``strides`` in elements (None: contiguous)."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None

    def of(self, slab: torch.Tensor) -> torch.Tensor:
        """The place as a view of ``slab`` (uint8, one dimension)."""
        flat = slab[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.view(self.shape) if self.strides is None else flat.as_strided(self.shape, self.strides)

    def moved(self, by: int) -> Place:
        """The same place so many bytes further on."""
        return replace(self, offset=self.offset + by)

    def small_in(self, nbytes: int) -> bool:
        """Whether it is a small part of a batch of ``nbytes``."""
        return self.nbytes * SMALL_SHARE < nbytes


def packable(leaf: Any) -> bool:
    """Whether it is a plain dense tensor in host memory: sparse and quantised ones and subclasses go by themselves."""
    return (
        type(leaf) is torch.Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not leaf.is_quantized
    )


def places_for(tensors: Iterable[torch.Tensor], start: int = 0) -> tuple[list[Place], int]:
    """A place for each tensor from byte ``start`` on, at aligned offsets and in this order; and where the last ends.

    Strides of dense tensors are kept (``channels_last``).
    """
    places: list[Place] = []
    end = start
    for tensor in tensors:
        offset = aligned(end)
        end = offset + tensor.nbytes
        strides = None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        places.append(Place(offset, tensor.nbytes, tensor.dtype, tuple(tensor.shape), strides))
    return places, end


class Packed:
    """The tensors of a batch, all of them in one slab: where they lie, or where they lie once more.

    Attributes:
        slab: host memory; its first ``nbytes`` are the batch.
    """

    __slots__ = ("_fields", "_lease", "nbytes")

    def __init__(
        self, lease: Lease, tensors: Sequence[torch.Tensor], places: Sequence[Place], nbytes: int
    ) -> None:
        self._lease = lease  # the slab stays as it is for as long as this lives
        self._fields = {
            id(tensor): (tensor, tensor._version, place)
            for tensor, place in zip(tensors, places, strict=True)
        }
        self.nbytes = nbytes

    @property
    def slab(self) -> torch.Tensor:
        """See the class."""
        return self._lease.slab

    def deliver(self, own: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """The tensors as they lie in the slab, small ones as ``own`` makes them; the batch is of these from now on."""
        made = []
        for tensor, _, place in self._fields.values():
            if place.small_in(self.nbytes):
                made.append(own(tensor))
            else:
                made.append(self._lease.tensor(place.dtype, place.shape, place.offset, place.strides))
        places = [place for _, _, place in self._fields.values()]
        self._fields = {id(t): (t, t._version, place) for t, place in zip(made, places, strict=True)}
        return made

    def places(self, tensors: Iterable[torch.Tensor]) -> list[Place] | None:
        """Where these tensors lie; None unless it is all of them, and none was changed since."""
        found = []
        for tensor in tensors:
            known = self._fields.get(id(tensor))
            if known is None or known[1] != tensor._version:
                return None
            found.append(known[2])
        return found


def pack(tensors: Sequence[torch.Tensor], ring: SlabRing, start: int = 0) -> tuple[Packed, list[Place]]:
    """Write tensors into one slab of ``ring``, each once, from byte ``start`` on.

    Returns:
        the batch, and its tensors' places in their order.
    """
    places, nbytes = places_for(tensors, start)
    slab = ring.take(nbytes)
    _write(tensors, places, slab)
    return Packed(ring.lend(slab), tensors, places, nbytes), places


def room_behind(nbytes: int, others: Iterable[torch.Tensor]) -> int:
    """Bytes of a slab that has room for ``others`` behind what fills its first ``nbytes``."""
    return places_for(others, nbytes)[1]


def pack_behind(lease: Lease, first: torch.Tensor, others: Sequence[torch.Tensor]) -> Packed | None:
    """Write ``others`` behind ``first``, a tensor of ``lease`` that fills the slab's start.

    Returns:
        the batch of all of them; None where the slab has no room for it.
    """
    place = Place(0, first.nbytes, first.dtype, tuple(first.shape), None)
    places, nbytes = places_for(others, first.nbytes)
    if nbytes > lease.slab.numel():
        return None
    _write(others, places, lease.slab)
    return Packed(lease, [first, *others], [place, *places], nbytes)


def _write(tensors: Sequence[torch.Tensor], places: Sequence[Place], slab: torch.Tensor) -> None:
    with torch.no_grad():
        for tensor, place in zip(tensors, places, strict=True):
            place.of(slab).copy_(tensor)
