"""Scatter and gather, usable on their own; and the parts of a call or a batch, fetched by each replica's own thread."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pipegraph.device.backend import Slot, normalised, sent
from pipegraph.device.split import (
    Scattered,
    Whole,
    chunk_sizes_for,
    cut,
    leaves,
    moved,
    refuse_packed,
    rows_of,
)
from pipegraph.errors import PipegraphWarning, ReplicaError, shown
from pipegraph.tree import is_dataclass_value, rebuilt, with_fields


def scatter(
    inputs: Any,
    devices: Sequence[torch.device | str | int],
    dim: int = 0,
    chunk_sizes: Sequence[int] | None = None,
) -> list[Any]:
    """Cut `inputs` and put part i on device i. Differentiable: its backward gathers.

    Args:
        inputs: any tree; see :mod:`pipegraph.device.split` for what is cut and what goes whole.
        devices: a device per part; the same device may stand there several times.
        dim: the dimension that is cut.
        chunk_sizes: rows per part; by default those of ``torch.chunk``.

    Returns:
        One entry per part: fewer than devices if there are fewer rows; one
        per device if nothing in `inputs` has rows.

    Raises:
        ValueError: unequal row counts, or `chunk_sizes` does not fit.
    """
    places = [normalised(device) for device in devices]
    rows = rows_of(inputs, dim)
    if rows is None:
        sizes = [0] * len(places)
    elif chunk_sizes is None:
        sizes = chunk_sizes_for(rows, len(places))
    else:
        sizes = list(chunk_sizes)
        if len(sizes) > len(places) or sum(sizes) != rows or min(sizes, default=0) < 0:
            raise ValueError(
                f"scatter: chunk_sizes {sizes} must be at most {len(places)} sizes >= 0 that sum to "
                f"{rows} rows"
            )
    parts = cut(inputs, sizes, dim)
    return [moved(part, place) for part, place in zip(parts, places, strict=False)]


def gather(outputs: Sequence[Any], output_device: torch.device | str | int, dim: int = 0) -> Any:
    """Join the outputs of replicas on one device. Differentiable: its backward scatters.

    Tensors are concatenated along `dim`, 0-dim ones become a vector (with a
    warning), dicts, dataclasses and (named) tuples and lists are joined inside, None stays, and so do numbers and
    strings that are the same on all replicas.

    Raises:
        ValueError: dicts with unequal keys, or nothing to gather.
        TypeError: outputs of several kinds, or of one that cannot be joined (a PackedSequence, say).
    """
    if not outputs:
        raise ValueError("gather: there are no outputs")
    return _gather(list(outputs), normalised(output_device), dim)


def _gather(outputs: list[Any], device: torch.device, dim: int) -> Any:
    first = outputs[0]
    if len(outputs) > 1:
        refuse_packed(first)
    kinds = (torch.Tensor, type(None), Mapping, (tuple, list))
    if len({tuple(isinstance(output, kind) for kind in kinds) for output in outputs}) > 1:
        found = ", ".join(type(output).__name__ for output in outputs)
        raise TypeError(f"gather: all replicas must return the same kind of output, got {found}")
    if isinstance(first, torch.Tensor):
        return _gather_tensors(outputs, device, dim)
    if first is None:
        return None
    if isinstance(first, Mapping):
        if any(first.keys() != other.keys() for other in outputs):
            keys = [sorted(map(str, other)) for other in outputs]
            raise ValueError(f"gather: all replicas' dicts need the same keys, got {keys}")
        joined = [(key, _gather([output[key] for output in outputs], device, dim)) for key in first]
        return type(first)(joined)  # type: ignore[call-arg]
    if is_dataclass_value(first):
        names = [field.name for field in dataclasses.fields(first)]
        return with_fields(
            first,
            {name: _gather([getattr(output, name) for output in outputs], device, dim) for name in names},
        )
    if isinstance(first, (bool, int, float, complex, str, bytes)) and all(
        other == first for other in outputs
    ):
        return first
    if not isinstance(first, Iterable) or isinstance(first, (str, bytes)):
        raise TypeError(
            f"gather: cannot join {', '.join(map(shown, outputs))} of type {type(first).__name__}: return tensors, or "
            "nests of them; numbers and strings only where all replicas return the same"
        )
    sequences = isinstance(first, (tuple, list))
    if sequences and len({len(other) for other in outputs}) > 1:
        raise ValueError(f"gather: sequences of lengths {[len(other) for other in outputs]} do not match")
    entries = [_gather(list(column), device, dim) for column in zip(*outputs, strict=True)]
    # As DataParallel does it: a container of another kind (a cache of keys and values) is made from its entries.
    kind: Any = type(first)
    return rebuilt(first, entries) if sequences else kind(entries)


def _gather_tensors(outputs: list[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    if all(output.dim() == 0 for output in outputs) and dim == 0:
        warnings.warn(
            "gather: all outputs are 0-dim (losses?); they come back as a vector, one entry per replica",
            PipegraphWarning,
            stacklevel=5,
        )
        outputs = [output.unsqueeze(0) for output in outputs]
    channels_last = all(
        output.dim() == 4 and output.is_contiguous(memory_format=torch.channels_last) for output in outputs
    )
    joined = torch.cat([sent(output, device) for output in outputs], dim)
    return joined.contiguous(memory_format=torch.channels_last) if channels_last else joined


@dataclass(frozen=True)
class ReplicaFeed:
    """Parts of one call.

    Attributes:
        fetch: by replica a function that gives its part, on its device, ready for the thread's stream.
        rows: by replica; None where they are unknown.
        parts: as they were given or cut.
    """

    fetch: Sequence[Callable[[], Any]]
    rows: list[int | None]
    parts: Sequence[Any]

    def shapes(self) -> object:
        """What a compiler would specialise on."""
        return tuple(
            (path, tuple(leaf.shape), leaf.dtype)
            for path, leaf in leaves(list(self.parts))
            if isinstance(leaf, torch.Tensor)
        )


def batch_feed(batch: Any, slots: Sequence[Slot], dim: int) -> ReplicaFeed:
    """A batch, already scattered or to be cut here, lists of its row count included.

    Raises:
        ReplicaError: scattered over other devices, or nothing to cut.
        ValueError: unequal row counts.
    """
    if isinstance(batch, Scattered):
        return _scattered_feed(batch, slots, dim)
    rows = rows_of(batch, dim, "batch")
    if rows is None:
        raise ReplicaError("the batch holds no tensor with rows to cut")
    sizes = chunk_sizes_for(rows, len(slots))
    return _moving(cut(batch, sizes, dim, lists=True), sizes, slots)


def call_feed(args: tuple[Any, ...], kwargs: dict[str, Any], slots: Sequence[Slot], dim: int) -> ReplicaFeed:
    """Arguments of a call; each part is a pair (args, kwargs), which are cut as one."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Scattered):
        feed = _scattered_feed(args[0], slots, dim)
        return replace(feed, fetch=[_as_argument(fetch) for fetch in feed.fetch])
    both = (args, kwargs)
    rows = rows_of(both, dim)
    if rows is None:
        # Nothing to cut: every replica gets all of it; without any inputs one replica is called.
        sizes = [0] * (len(slots) if args or kwargs else 1)
    else:
        sizes = chunk_sizes_for(rows, len(slots))
    return _moving(cut(both, sizes, dim), sizes, slots)


def _scattered_feed(batch: Scattered, slots: Sequence[Slot], dim: int) -> ReplicaFeed:
    places = [slot.device for slot in slots]
    if list(batch.devices) != places[: len(batch)]:
        raise ReplicaError(
            f"the batch is scattered over {list(map(str, batch.devices))}, the executor's devices are "
            f"{list(map(str, places))}"
        )
    rows = list(batch.rows or [rows_of(part, dim, "batch") for part in batch])
    fetch = [partial(batch.wait, replica) for replica in range(len(batch))]
    return ReplicaFeed(fetch, rows, batch)


def _moving(parts: list[Any], rows: Sequence[int | None], slots: Sequence[Slot]) -> ReplicaFeed:
    return ReplicaFeed([_mover(part, slots[r].device) for r, part in enumerate(parts)], list(rows), parts)


def _mover(part: Any, device: torch.device) -> Callable[[], Any]:
    if from_another_gpu(part, device):
        # The caller's current stream of that GPU made the part; a replica's thread has another one there.
        there = moved(part, device)
        return lambda: there
    return lambda: moved(part, device)


def from_another_gpu(part: Any, device: torch.device) -> bool:
    """Whether a copy of this part depends on the stream that is current on another device than its own."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" and leaf.device != device
        for _, given in leaves(part)
        for _, leaf in leaves(given.value if isinstance(given, Whole) else given)
    )


def _as_argument(fetch: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: ((fetch(),), {})
