"""Builds persistent replicas, and keeps them equal before every call."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import Embedding, EmbeddingBag, Module, Parameter, SyncBatchNorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode

from pipegraph.device.backend import Slot
from pipegraph.errors import ReplicaError
from pipegraph.replicas.replicate import broadcast_coalesced

APART = frozenset({"_parameters", "_modules"})
"""Not attributes of a module: these may not be exchanged."""


def check_model(model: Module, first: torch.device) -> None:
    """Refuse by name what cannot be replicated.

    Raises:
        ReplicaError: a parameter or buffer that is not on the first device, or is not initialised; a module whose
            ``compile()`` was called.
    """
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise ReplicaError(
                f"module {name or 'at the top'!r} was compiled in place, which its copies would lose: give the "
                "executor torch.compile(model) instead"
            )
    named: list[tuple[str, str, torch.Tensor]] = [("parameter", n, p) for n, p in model.named_parameters()]
    named += [("buffer", n, b) for n, b in model.named_buffers()]
    for kind, name, tensor in named:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ReplicaError(f"{kind} {name!r} is not initialised yet: call the lazy module once before")
        if tensor.device != first:
            raise ReplicaError(
                f"{kind} {name!r} is on {tensor.device}, but all must start on the first device, {first}: "
                f"model.to({str(first)!r})"
            )


def _refuse_for_copies(model: Module) -> None:
    """Refuse by name what would happen to one replica of several.

    Raises:
        ReplicaError: a parameter has hooks of its own; a buffer requires grad; a ``SyncBatchNorm``; an embedding that
            renormalises itself.
    """
    _refuse_hooks(model)
    for name, buffer in model.named_buffers():
        if buffer.requires_grad:
            raise ReplicaError(
                f"buffer {name!r} requires grad, and gradients of buffers are not summed over replicas: make it a "
                "Parameter, or detach it"
            )
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm):
            raise ReplicaError(
                f"module {name or 'at the top'!r} (SyncBatchNorm) would synchronise nothing, for the replicas are no "
                "process group: use BatchNorm, or DistributedDataParallel"
            )
        if isinstance(module, (Embedding, EmbeddingBag)) and module.max_norm is not None:
            raise ReplicaError(
                f"embedding {name or 'at the top'!r} has max_norm={module.max_norm}: every forward would renormalise "
                "the rows that its replica sees, and the replicas' weights would differ: set max_norm to None, and "
                "renormalise executor.module's weight after a step (torch.renorm), then executor.sync()"
            )


def _refuse_hooks(model: Module, ours: bool = False) -> None:
    """Of parameters; ``ours``: the reducer has registered some, that run when a gradient has been accumulated."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or (not ours and parameter._post_accumulate_grad_hooks):
            raise ReplicaError(
                f"parameter {name!r} has tensor hooks, which its copies cannot share: register them on the "
                "module (register_full_backward_hook), or remove them"
            )


def refuse_held_gradients(model: Module) -> None:
    """Raises ReplicaError if a parameter has a gradient, and names it."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise ReplicaError(
                f"parameter {name!r} holds a gradient, which the first step would add to its own: call zero_grad() on "
                "the model before it is given to the executor"
            )


def build_replica(model: Module, first: torch.device, device: torch.device) -> Module:
    """A copy of `model` with leaf parameters and buffers of its own on `device`.

    Shared parameters and modules stay shared; nothing is held twice on the first device on the way. Tensors that
    attributes hold come along, detached.

    Raises:
        ReplicaError: an attribute cannot be deep-copied; names it.
    """
    memo: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = _leaf_on(parameter, device)
    for buffer in model.buffers():
        memo[id(buffer)] = _copy_on(buffer, device).requires_grad_(buffer.requires_grad)
    try:
        module: Module = copied(model, first, device, dict(memo))  # it adds entries of its own to the memo
    except Exception as error:
        raise ReplicaError(f"the model cannot be copied: {_culprit(model, memo, error)}") from error
    return module


def copied(value: Any, source: torch.device, target: torch.device, memo: dict[int, Any]) -> Any:
    """A deep copy whose tensors on `source` lie on `target`: those with a history come detached."""
    with _Moving(source, target):
        return copy.deepcopy(value, memo)


class _Moving(TorchFunctionMode):
    """Takes over how tensors are deep-copied: torch refuses those that are no leaves, and moves none."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source = source
        self._target = target

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.Tensor.__deepcopy__:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            place = self._target if tensor.device == self._source else tensor.device
            moved = tensor.detach().to(place, copy=True)
            memo[id(tensor)] = moved.requires_grad_(tensor.requires_grad and tensor.is_leaf)
        return memo[id(tensor)]


def _copy_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    data = tensor.detach()
    return torch.empty_like(data, device=device).copy_(data)


def _leaf_on(parameter: Parameter, device: torch.device) -> Parameter:
    # _make_subclass keeps subclasses of Parameter.
    leaf = torch.Tensor._make_subclass(type(parameter), _copy_on(parameter, device), parameter.requires_grad)
    leaf.__dict__.update({key: copy.copy(value) for key, value in vars(parameter).items()})
    return leaf


def _culprit(model: Module, memo: dict[int, Any], error: Exception) -> str:
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name == "_modules":
                continue
            try:
                here = torch.device("cpu")
                copied(value, here, here, dict(memo) | {id(m): m for m in model.modules()})
            except Exception as own:
                path = f"{prefix}.{name}" if prefix else name
                return f"attribute {path!r} of type {type(value).__name__} ({own})"
    return str(error)


class Replicas:
    """The replicas of one model, the first of which *is* the model; it is checked, and copied to the other slots.

    Not thread-safe: the executor calls it between phases.
    """

    def __init__(self, model: Module, slots: Sequence[Slot]) -> None:
        first = slots[0].device
        check_model(model, first)
        if len(slots) > 1:
            _refuse_for_copies(model)
        self.slots = slots
        self.modules = [model, *(build_replica(model, first, slot.device) for slot in slots[1:])]
        self.parameters = [list(module.parameters()) for module in self.modules]
        self.names = [name for name, _ in self.modules[0].named_parameters()]
        self._submodules = [list(module.modules()) for module in self.modules]
        self._tree = self._identities()
        self._names = self._named()
        self._written: list[int] = []
        self.note_buffers()
        self.note_parameters()

    def _named(self) -> set[tuple[str, int]]:
        """The first replica's modules and parameters, by name and identity: what may not change."""
        first = self.modules[0]
        named = [*first.named_modules(), *first.named_parameters()]
        return {(name, id(part)) for name, part in named}

    def _identities(self) -> list[int]:
        """The same without names: cheap enough for every call."""
        return [
            id(part)
            for module in self._submodules[0]
            for held in (module._modules, module._parameters)
            for part in held.values()
        ]

    def check_tree(self) -> None:
        """Raises:
        ReplicaError: modules or parameters were added, removed or exchanged since the build, or a parameter was given a
            hook; names one.
        """
        if len(self.modules) > 1:
            _refuse_hooks(self.modules[0], ours=True)
        if self._identities() == self._tree:
            return
        changed = sorted(name for name, _ in self._named() ^ self._names)
        raise ReplicaError(
            f"the module tree has changed since the executor was built, at {(changed or ['?'])[0]!r}: build a new "
            "executor after changing modules or exchanging parameters (pruning and parametrizations do both)"
        )

    def sparse(self) -> set[int]:
        """Parameters of embeddings that give sparse gradients."""
        tables = {
            id(module.weight)
            for module in self._submodules[0]
            if isinstance(module, (Embedding, EmbeddingBag)) and module.sparse
        }
        return {index for index, parameter in enumerate(self.parameters[0]) if id(parameter) in tables}

    def drop_gradients(self) -> None:
        """Of all replicas."""
        for given in self.parameters:
            for parameter in given:
                parameter.grad = None

    def copy_flags(self) -> None:
        """Copy `training` and `requires_grad` from the first replica."""
        for submodules, given in zip(self._submodules[1:], self.parameters[1:], strict=True):
            for mine, its in zip(self._submodules[0], submodules, strict=True):
                if its.training != mine.training:
                    its.training = mine.training
            for mine_p, its_p in zip(self.parameters[0], given, strict=True):
                if its_p.requires_grad != mine_p.requires_grad:
                    its_p.requires_grad_(mine_p.requires_grad)

    def copy_all(self) -> None:
        """The first replica's parameters, buffers and attributes to the others.

        Raises:
            ReplicaError: a parameter's type, shape or device has changed, or an attribute cannot be copied; names it.
        """
        self._copy_parameters()
        for slot, submodules in zip(self.slots[1:], self._submodules[1:], strict=True):
            memo: dict[int, Any] = {}
            pairs = list(zip(self._submodules[0], submodules, strict=True))
            for mine, its in pairs:
                memo[id(mine)] = its
                memo |= {
                    id(p): its._parameters[name] for name, p in mine._parameters.items() if p is not None
                }
            for mine, its in pairs:
                for name in vars(its).keys() - vars(mine).keys():
                    del vars(its)[name]
                for name, value in vars(mine).items():
                    if name not in APART:
                        self._give(its, name, value, slot.device, memo)
        self.note_buffers()

    def _give(
        self, module: Module, name: str, value: Any, device: torch.device, memo: dict[int, Any]
    ) -> None:
        try:
            vars(module)[name] = copied(value, self.slots[0].device, device, memo)
        except Exception as error:
            raise ReplicaError(
                f"{type(module).__name__}.{name} was set after the executor was built, and the replicas' copies "
                f"cannot be made ({error}): set it before, or hold it outside the module"
            ) from error

    def _copy_parameters(self) -> None:
        """The first replica's values into the others' parameters.

        Through ``.data``, so that graphs still alive (two forwards before a backward) are not invalidated.
        """
        sources = [parameter.data for parameter in self.parameters[0]]
        for name, mine, its in zip(self.names, sources, self.parameters[-1], strict=True):
            if mine.dtype != its.dtype or mine.shape != its.shape or mine.device != self.slots[0].device:
                raise ReplicaError(
                    f"parameter {name!r} is now {mine.dtype} {tuple(mine.shape)} on {mine.device}, and was "
                    f"{its.dtype} {tuple(its.shape)} on {self.slots[0].device} when the executor was built: build a "
                    "new one after converting or moving the model"
                )
        copies = broadcast_coalesced(sources, [slot.device for slot in self.slots])
        for given, values in zip(self.parameters[1:], copies[1:], strict=True):
            for parameter, value in zip(given, values, strict=True):
                parameter.data.copy_(value)
        self.note_parameters()

    def note_parameters(self) -> None:
        """Remember the first replica's parameters as those that all replicas have."""
        if len(self.modules) > 1:
            self._written = [parameter._version for parameter in self.parameters[0]]

    def refuse_written(self) -> None:
        """Raises ReplicaError if somebody has written to a parameter of the first replica since, and names it.

        Writes through ``.data``, and those of fused optimizers, do not move the counter.
        """
        for name, parameter, version in zip(self.names, self.parameters[0], self._written, strict=False):
            if parameter._version != version:
                raise ReplicaError(
                    f"parameter {name!r} was written since the last step, and the other replicas have its old value: "
                    "call executor.sync() after writing"
                )

    def held(self, replica: int, attributes: bool) -> Iterator[dict[str, Any]]:
        """The buffers of a replica, module by module, or these and its attributes."""
        for module in self._submodules[replica]:
            yield module._buffers
            if attributes:
                yield {name: value for name, value in vars(module).items() if name not in APART}

    def copy_buffers(self) -> bool:
        """The first replica's changed buffers to the others, as *new* tensors: graphs may still use the old.

        Returns:
            Whether there were any.
        """
        changed = [
            (index, name, buffer)
            for index, module in enumerate(self._submodules[0])
            for name, buffer in module._buffers.items()
            if buffer is not None and self._given.get(id(buffer)) != (buffer._version, buffer.data_ptr())
        ]
        if len(self.modules) == 1 or not changed:
            return False
        once = {id(buffer): buffer.detach() for _, _, buffer in changed}  # a shared one stays shared
        copies = broadcast_coalesced(list(once.values()), [slot.device for slot in self.slots])
        for others, values in zip(self._submodules[1:], copies[1:], strict=True):
            table = dict(zip(once, values, strict=True))
            for index, name, buffer in changed:
                others[index]._buffers[name] = table[id(buffer)]
        self.note_buffers()
        return True

    def note_buffers(self) -> None:
        """Remember the first replica's buffers as given to the others.

        Not so floating-point buffers of a module in training, which count as changed next time: batch norm
        updates its statistics without moving their version counter (seen with torch 2.13).
        """
        self._given = {
            id(buffer): (buffer._version, buffer.data_ptr())
            for module in self._submodules[0]
            for buffer in module._buffers.values()
            if buffer is not None and not (module.training and buffer.is_floating_point())
        }
