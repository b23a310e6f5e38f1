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
    owners: Sequence[int] | None,
    order: Sequence[int],
    replicas: int,
    first_bytes: int = FIRST_BUCKET_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[GradientBucket, ...]:
    """Buckets in the order in which they are expected to be full.

    Args:
        parameters: of one replica.
        owners: by parameter the replica that steps it; None where every replica does.
        order: indices in the expected order of their gradients' arrival.
        replicas: buckets without owners are dealt to replicas in turn, so that each reduces its share.
    """
    open_buckets: dict[tuple[torch.dtype, int | None], list[int]] = {}
    sizes: dict[tuple[torch.dtype, int | None], int] = {}
    closed: list[tuple[tuple[torch.dtype, int | None], list[int]]] = []
    for index in order:
        key = (parameters[index].dtype, None if owners is None else owners[index])
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
    parameters: Sequence[torch.Tensor],
    key: tuple[torch.dtype, int | None],
    indices: Sequence[int],
    turn: int,
) -> GradientBucket:
    dtype, owner = key
    step = max(1, ALIGN_BYTES // dtype.itemsize)
    offsets, end = {}, 0
    for index in indices:
        offsets[index] = end
        end += -(-parameters[index].numel() // step) * step
    return GradientBucket(dtype, offsets, end, turn if owner is None else owner)


def deal_owners(nbytes: Sequence[int], replicas: int) -> list[int]:
    """An owner for each parameter, whole ones, so that the replicas' shares of bytes are nearly equal.

    Largest first to the replica with the least so far (Graham's LPT rule); ties go to the lower replica.
    """
    owners = [0] * len(nbytes)
    load = [0] * replicas
    for index in sorted(range(len(nbytes)), key=lambda i: (-nbytes[i], i)):
        owners[index] = min(range(replicas), key=lambda replica: (load[replica], replica))
        load[owners[index]] += nbytes[index]
    return owners
