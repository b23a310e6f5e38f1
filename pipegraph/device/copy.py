"""Copying a whole batch to a device on a stage's own stream."""

from __future__ import annotations

from typing import Any

import torch

from pipegraph.device.backend import Backend, Event, Stream
from pipegraph.tree import map_leaves


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, differentiably; the same where it lies there.

    Towards a device the copy is asynchronous, on the current stream. Towards the host it is waited for: who reads host
    memory waits for no stream, and would read what was there before.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def copy_tree(tree: Any, backend: Backend, stream: Stream) -> tuple[Any, Event]:
    """Copy the tensors of `tree` to the backend's device on `stream`. Returns at once.

    On CUDA the copies' memory comes from the pool of the calling thread's current stream, which is to use them, so
    that it may be freed while that stream still reads it.

    Args:
        tree: any nest of dicts, lists, tuples, named tuples, dataclasses; leaves that are
            no tensors are passed on as they are. Strides of dense tensors are kept.
        backend: of the target device.
        stream: of that backend, the stage's own.

    Returns:
        The same nest with the copies, and the event after which they may be
        read: ``event.wait()`` makes the calling thread's current stream wait for it, and the
        host only where the host is that stream. The bytes of `tree` must stay as they are until
        the event is reached; then they may be overwritten.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def allocated(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        copy = torch.empty_like(leaf, device=backend.device, requires_grad=False)
        pairs.append((copy, leaf))
        return copy

    consumer = backend.current_stream()
    with backend.use(consumer):
        copied = map_leaves(allocated, tree)
        # The new memory may be a block that earlier work of the consumer still uses.
        stream.wait_event(consumer.record_event())
    for copy, leaf in pairs:
        backend.copy_async(copy, leaf, stream)
    return copied, stream.record_event()
