"""Functional replicas: new module objects whose tensors are differentiable copies of the first's.

For persistent replicas with parameters of their own see :mod:`pipegraph.replicas.build`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import Function
from torch.nn import Module

from pipegraph.device.backend import normalised
from pipegraph.errors import ReplicaError
from pipegraph.replicas.coalesce import broadcast_coalesced, reduce_add_coalesced

M = TypeVar("M", bound=Module)


class _Broadcast(Function):
    """All tensors to all devices; the backward is the coalesced sum."""

    @staticmethod
    def forward(ctx: Any, devices: list[torch.device], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.devices = devices
        ctx.count = len(tensors)
        copies = broadcast_coalesced(tensors, devices)
        copies[0] = [tensor.view_as(tensor) for tensor in tensors]
        fixed = [
            copy
            for given in copies
            for copy, needed in zip(given, ctx.needs_input_grad[1:], strict=True)
            if not needed
        ]
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return tuple(copy for given in copies for copy in given)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        # What no replica has used keeps no gradient, as on one device: zeros would move it by weight decay.
        found: dict[int, torch.Tensor] = {}
        for place, grad in enumerate(grads):
            if grad is not None:
                found.setdefault(place % ctx.count, grad)
        given: list[torch.Tensor] = []
        for place, grad in enumerate(grads):
            if (like := found.get(place % ctx.count)) is not None:
                device = ctx.devices[place // ctx.count]
                given.append(torch.zeros_like(like, device=device) if grad is None else grad)
        sums: list[torch.Tensor | None] = [None] * ctx.count
        if found:
            added = _apply(_ReduceAdd, ctx.devices, len(found), *given)
            for index, total in zip(sorted(found), added, strict=True):
                sums[index] = total
        return (None, *sums)


class _ReduceAdd(Function):
    """The sum over devices, tensor by tensor; the backward is the broadcast."""

    @staticmethod
    def forward(
        ctx: Any, devices: list[torch.device], count: int, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.devices = devices
        given = [grads[start : start + count] for start in range(0, len(grads), count)]
        return tuple(reduce_add_coalesced(given, devices[0]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, None, *_apply(_Broadcast, ctx.devices, *grads))


def _apply(function: type[Function], *arguments: Any) -> tuple[torch.Tensor, ...]:
    return function.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


def replicate(module: M, devices: Sequence[torch.device | str | int], detach: bool = False) -> list[M]:
    """One module per device, alike in everything, whose tensors are copies of `module`'s.

    Gradients of the copies flow back to `module`'s parameters, summed, unless `detach`. Shared parameters and
    shared submodules stay shared; buffers are copied (those that need gradients differentiably); the first
    replica's buffers are `module`'s own, so their in-place updates persist. ``replica.parameters()`` works. The copies
    are not compiled.

    Raises:
        ReplicaError: a ``ScriptModule`` with Python children.
        ValueError: a parameter or buffer is not on the first device.
    """
    refuse_mixed_script(module)
    places = [normalised(device) for device in devices]
    if not places:
        return []
    parameters = list(module.parameters())
    buffers = list(module.buffers())
    flowing = [buffer for buffer in buffers if buffer.requires_grad and not detach]
    fixed = [buffer for buffer in buffers if not (buffer.requires_grad and not detach)]
    sources = [*parameters, *flowing]
    if detach:
        copies = broadcast_coalesced(sources, places)
        copies[0] = [tensor.detach() for tensor in sources]
    elif sources:
        flat = _apply(_Broadcast, places, *sources)
        copies = [list(flat[start : start + len(sources)]) for start in range(0, len(flat), len(sources))]
    else:
        copies = [[] for _ in places]
    fixed_copies = broadcast_coalesced(fixed, places)
    replicas = []
    for mine, mine_fixed in zip(copies, fixed_copies, strict=True):
        table = dict(zip(map(id, sources), mine, strict=True)) | dict(
            zip(map(id, fixed), mine_fixed, strict=True)
        )
        replicas.append(_rebuilt(module, table))
    return replicas


def _rebuilt(module: M, table: dict[int, torch.Tensor]) -> M:
    """The module tree anew, every parameter and buffer replaced by its copy, compiled modules as they were before."""
    made: dict[Module, Module] = {}
    for old in module.modules():
        if "_orig_mod" not in old._modules:
            made[old] = old._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    plain = dict(made)
    for old in module.modules():
        if "_orig_mod" in old._modules:  # torch.compile's wrapper calls the module that it was made for
            made[old] = plain[old._modules["_orig_mod"]]  # type: ignore[index]
    for old, new in plain.items():
        for name, child in old._modules.items():
            new._modules[name] = None if child is None else made[child]
        for name, given in old._parameters.items():
            if given is not None:
                # By setattr first, for modules that keep lists of their weights (RNNs); then in
                # `_parameters`, where `parameters()` finds them although they are no leaves.
                setattr(new, name, table[id(given)])
                new.__dict__.pop(name, None)
        new._parameters = {
            name: None if given is None else table[id(given)]  # type: ignore[misc]
            for name, given in old._parameters.items()
        }
        new._buffers = {
            name: None if given is None else table[id(given)] for name, given in old._buffers.items()
        }
    return made[module]  # type: ignore[return-value]


def refuse_mixed_script(module: Module) -> None:
    """A ScriptModule keeps its Python children's tensors out of reach, so they cannot be replaced.

    Raises:
        ReplicaError: names the ScriptModule and the child.
    """
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            for inner, grandchild in child.named_modules():
                if not isinstance(grandchild, torch.jit.ScriptModule):
                    raise ReplicaError(
                        f"cannot replicate: ScriptModule {name or 'at the top'!r} has the Python child "
                        f"{inner!r}; script the child too, or leave the parent unscripted"
                    )
