"""Broadcasts and sums many small tensors in few large copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pipegraph.device.backend import normalised, sent

#: Bytes; DataParallel's choice, large enough that a copy's fixed cost is nothing.
BUFFER_SIZE = 10 * 1024 * 1024


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor],
    devices: Sequence[torch.device | str | int],
    buffer_size: int = BUFFER_SIZE,
) -> list[list[torch.Tensor]]:
    """Copies of `tensors` (all on ``devices[0]``) for every device, without autograd.

    Small tensors travel together in buffers of about `buffer_size` bytes, sparse ones by themselves; what
    comes back is in the callers' order also for mixed types. Every tensor has a version counter of its
    own and keeps its strides. The first device gets the given tensors themselves.

    Raises:
        ValueError: a tensor is not on the first device.
    """
    places = [normalised(device) for device in devices]
    if not places:
        return []
    for index, tensor in enumerate(tensors):
        if tensor.device != places[0]:
            raise ValueError(
                f"broadcast: tensor {index} is on {tensor.device}, but all must start on the first device, "
                f"{places[0]}"
            )
    with torch.no_grad():
        copies: list[list[torch.Tensor]] = [list(tensors)]
        for place in places[1:]:
            received = {
                i: tensor.detach().to(place, copy=True)
                for i, tensor in enumerate(tensors)
                if tensor.is_sparse
            }
            for group in _groups(tensors, buffer_size):
                given = [tensors[i].detach() for i in group]
                flat = torch.cat([_flat(tensor, tensor) for tensor in given])
                received.update(zip(group, _cut_like(sent(flat, place), given), strict=True))
            copies.append([received[i] for i in range(len(tensors))])
    return copies


def reduce_add_coalesced(
    inputs: Sequence[Sequence[torch.Tensor]],
    destination: torch.device | str | int,
    buffer_size: int = BUFFER_SIZE,
) -> list[torch.Tensor]:
    """Tensor by tensor the sum over replicas, on `destination`, without autograd.

    Args:
        inputs: per replica the same tensors in the same order.
        destination: the device of the sums.
        buffer_size: bytes of the buffers that small tensors travel in.

    The sum is made in the order of the replicas, so it repeats bit by bit.
    """
    place = normalised(destination)
    if not inputs:
        return []
    count = len(inputs[0])
    if any(len(given) != count for given in inputs):
        raise ValueError(f"reduce_add: replicas gave {[len(given) for given in inputs]} tensors")
    with torch.no_grad():
        sparse = {i for i in range(count) if any(given[i].is_sparse for given in inputs)}
        sums = {i: sum_in_order([given[i].detach().to(place) for given in inputs]) for i in sparse}
        dense = [i for i in range(count) if i not in sparse]
        chosen = [inputs[0][i] for i in dense]
        for group in _groups(chosen, buffer_size):
            flats = [
                torch.cat([_flat(given[dense[i]].detach(), chosen[i]) for i in group]) for given in inputs
            ]
            total = sum_in_order([sent(flat, place) for flat in flats])
            parts = _cut_like(total, [chosen[i] for i in group])
            sums.update(zip([dense[i] for i in group], parts, strict=True))
    return [sums[i] for i in range(count)]


def sum_in_order(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``((t0 + t1) + t2) + ...``, a new tensor; sparse sums are coalesced, sums of sparse and dense tensors dense."""
    if len({tensor.is_sparse for tensor in tensors}) > 1:
        tensors = [tensor.to_dense() for tensor in tensors]
    if len(tensors) == 1:
        return tensors[0].clone()
    total = tensors[0] + tensors[1]
    for tensor in tensors[2:]:
        total = total + tensor if total.is_sparse else total.add_(tensor)
    return total.coalesce() if total.is_sparse else total


def flat_like(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A 1-d stretch seen with the shape of `like`, and with its order of dimensions."""
    if like.is_contiguous():
        return flat.view(like.shape)
    return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride(), flat.storage_offset())


def _flat(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements in the memory order of `like`, which may be another than the tensor's own."""
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor.reshape(-1)
    return torch.empty_like(like, device=tensor.device).copy_(tensor).as_strided((like.numel(),), (1,))


def _cut_like(flat: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts, start = [], 0
    for like in likes:
        # `.data`: a version counter of its own for each part of the buffer.
        parts.append(flat_like(flat.narrow(0, start, like.numel()), like).data)
        start += like.numel()
    return parts


def _groups(tensors: Sequence[torch.Tensor], buffer_size: int) -> Iterator[list[int]]:
    """Indices of the dense ones that travel together: one dtype each, about `buffer_size` bytes."""
    by_type: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if not tensor.is_sparse:
            by_type.setdefault(tensor.dtype, []).append(index)
    for indices in by_type.values():
        group: list[int] = []
        nbytes = 0
        for index in indices:
            group.append(index)
            nbytes += tensors[index].nbytes
            if nbytes >= buffer_size:
                yield group
                group, nbytes = [], 0
        if group:
            yield group
