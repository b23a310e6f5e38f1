"""Copying a whole batch to a device on a stage's own stream."""

from __future__ import annotations

from typing import Any

import optree
import torch

from pipegraph.device.contract import Backend, Event, Stream


def copy_tree(
    tree: Any, backend: Backend, stream: Stream, *, consumer: Stream | None = None, free: Event | None = None
) -> tuple[Any, Event]:
    """Copy the tensors of `tree` to the backend's device on `stream`. Returns at once.

    Args:
        tree: any nest of dicts, lists, tuples, named tuples; leaves that are
            no tensors are passed on as they are. Strides of dense tensors are kept.
        backend: of the target device.
        stream: of that backend, the stage's own.
        consumer: the stream that will use the copies (default: the calling
            thread's current one). On CUDA their memory comes from its pool, so that it
            may be freed while that stream still reads it.
        free: an event to wait for before the first byte is written.

    Returns:
        The same nest with the copies, and the event after which they may be
        read: ``event.wait()`` makes the calling thread's current stream wait for it, and the
        host only where the host is that stream. The bytes of `tree` must stay as they are until
        the event is reached; then they may be overwritten.
    """
    target = consumer if consumer is not None else backend.current_stream()
    leaves, shape = optree.tree_flatten(tree, none_is_leaf=True)
    copies: list[Any] = []
    with backend.use(target):
        for leaf in leaves:
            is_tensor = isinstance(leaf, torch.Tensor)
            copies.append(
                torch.empty_like(leaf, device=backend.device, requires_grad=False) if is_tensor else leaf
            )
        # The new memory may be a block that earlier work of the consumer still uses.
        allocated = target.record_event()
    stream.wait_event(allocated)
    if free is not None:
        stream.wait_event(free)
    for copy, leaf in zip(copies, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            backend.copy_async(copy, leaf, stream)
    return optree.tree_unflatten(shape, copies), stream.record_event()
