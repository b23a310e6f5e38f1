"""One optimizer per replica, all of them alike."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from pipegraph.errors import ReplicaError, StateError

Factory = Callable[[Any], Optimizer]


class ReplicaOptimizers:
    """The replicas' optimizers.

    Args:
        factory: gets a replica's parameters as a list, or the replica itself when its
            parameter is named ``module``.

    Attributes:
        each: by replica. What users and schedulers change in the first one's settings, the others follow.

    Raises:
        ReplicaError: no optimizer came back, or one that needs a closure, or that holds other parameters than
            the replica's.
    """

    def __init__(self, factory: Factory, modules: Sequence[Module]) -> None:
        by_name = "module" in inspect.signature(factory).parameters
        self._parameters = [list(module.parameters()) for module in modules]
        self.each = [
            factory(module if by_name else list(given))
            for module, given in zip(modules, self._parameters, strict=True)
        ]
        _check(self.each[0])
        self._layout = self._indices(0)
        if any(self._indices(replica) != self._layout for replica in range(1, len(self.each))):
            raise ReplicaError("optimizer= made different parameter groups for different replicas")

    def _indices(self, replica: int) -> list[list[int]]:
        """Per group its parameters' indices in the module."""
        index = {id(parameter): i for i, parameter in enumerate(self._parameters[replica])}
        try:
            return [[index[id(p)] for p in group["params"]] for group in self.each[replica].param_groups]
        except KeyError:
            raise ReplicaError(
                "optimizer= must use the parameters it is given, of every replica its own; it holds others"
            ) from None

    def align(self) -> None:
        """Before a step: the first one's settings (learning rates ...) to all, tensors by value."""
        if len(self.each) == 1:
            return
        if self._indices(0) != self._layout:
            raise ReplicaError(
                "the parameters in executor.optimizer.param_groups have changed: build a new executor, whose "
                "optimizer= makes all groups"
            )
        first, *others = (optimizer.param_groups for optimizer in self.each)
        for groups in others:
            for mine, its in zip(first, groups, strict=True):
                for key, value in mine.items():
                    if key == "params":
                        continue
                    if isinstance(value, torch.Tensor) and isinstance(its.get(key), torch.Tensor):
                        its[key].copy_(value)
                    else:
                        its[key] = value.clone() if isinstance(value, torch.Tensor) else value

    # A step

    def unscale(self, scaler: GradScaler) -> bool:
        """Divide all gradients by the scale, in place; whether they are finite (on every replica alike)."""
        if not scaler.is_enabled():
            return True
        for optimizer in self.each:
            scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(self.each[0]).values()
        return not any(bool(flag.item()) for flag in found)

    def forget_scaling(self, scaler: GradScaler) -> None:
        """After a failure: the scaler holds nothing of the step that was dropped, or it would refuse the next."""
        for optimizer in self.each:
            scaler._per_optimizer_states.pop(id(optimizer), None)

    def clip(self, limit: float) -> torch.Tensor:
        """Scale gradients to a total norm of at most `limit`; the norm before, on the first device."""
        grads = [parameter.grad for parameter in self._parameters[0] if parameter.grad is not None]
        norm = get_total_norm(grads)
        for given in self._parameters:
            if given:
                clip_grads_with_norm_(given, limit, norm.to(given[0].device))
        return norm

    # States

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises StateError if the groups of a state do not fit."""
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes != [len(indices) for indices in self._layout]:
            raise StateError(
                f"the optimizer state has parameter groups of {sizes} parameters, this optimizer of "
                f"{[len(indices) for indices in self._layout]}"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checked state into all; every replica gets tensors of its own."""
        for optimizer in self.each:
            optimizer.load_state_dict(copy.deepcopy(dict(state)))


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ReplicaError(f"optimizer= must make one optimizer, got {type(optimizer).__name__}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ReplicaError(
            f"{type(optimizer).__name__} needs a closure that evaluates the model again, which a step over "
            "replicas cannot give it: use an optimizer whose step() takes none"
        )
