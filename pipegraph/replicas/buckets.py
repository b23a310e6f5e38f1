"""Assigns gradients to buckets, from sizes and order of use. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# As in DDP: large enough that a transfer's fixed cost is nothing, and a small
# first one so that reduction starts as soon as backward does.
BUCKET_BYTES = 25 * 1024 * 1024
FIRST_BUCKET_BYTES = 1024 * 1024
# Every gradient starts at a multiple of this, so vector loads stay aligned.
ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients of one type that are reduced together, on replica `owner`'s side stream.

    `offsets`: by parameter its place, in elements.
    """

    dtype: torch.dtype
    offsets: dict[int, int]
    numel: int
    owner: int


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    replicas: int,
    first_bytes: int = FIRST_BUCKET_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[GradientBucket, ...]:
    """Buckets in the order in which they are expected to be full.

    Args:
        parameters: of one replica.
        order: indices in the expected order of their gradients' arrival.
        replicas: buckets are dealt to replicas in turn, so that each reduces its share.
    """
    open_buckets: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    closed: list[tuple[torch.dtype, list[int]]] = []
    for index in order:
        key = parameters[index].dtype
        open_buckets.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, 0) + parameters[index].nbytes
        if sizes[key] >= (bucket_bytes if closed else first_bytes):
            closed.append((key, open_buckets.pop(key)))
            sizes[key] = 0
    closed.extend(open_buckets.items())
    return tuple(
        _laid_out(parameters, key, indices, number % replicas) for number, (key, indices) in enumerate(closed)
    )


def _laid_out(
    parameters: Sequence[torch.Tensor], dtype: torch.dtype, indices: Sequence[int], owner: int
) -> GradientBucket:
    step = max(1, ALIGN_BYTES // dtype.itemsize)
    offsets, end = {}, 0
    for index in indices:
        offsets[index] = end
        end += -(-parameters[index].numel() // step) * step
    return GradientBucket(dtype, offsets, end, owner)
