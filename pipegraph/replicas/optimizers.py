"""One optimizer per replica that behave as one: schedule A (all step) and B (each steps what it owns)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module, Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from pipegraph.errors import ReplicaError, StateError

Factory = Callable[[Any], Optimizer]


class ReplicaOptimizers:
    """The optimizers of all replicas.

    Args:
        factory: gets a replica's parameters as a list, or the replica itself when its
            parameter is named ``module``.
        modules: the replicas.
        owners: the replica that steps each parameter, whole ones (schedule B); None where all step all.

    Raises:
        ReplicaError: the optimizer needs a closure, or holds other parameters than the replica's.
    """

    def __init__(self, factory: Factory, modules: Sequence[Module], owners: Sequence[int] | None) -> None:
        by_name = "module" in inspect.signature(factory).parameters
        self._parameters = [list(module.parameters()) for module in modules]
        self.each = [
            factory(module if by_name else list(given))
            for module, given in zip(modules, self._parameters, strict=True)
        ]
        _refuse_closure(self.each[0])
        self._owners = owners
        self._layout = self._indices(0)
        if any(self._indices(replica) != self._layout for replica in range(1, len(modules))):
            raise ReplicaError("optimizer= made different parameter groups for different replicas")
        if owners is not None:
            for replica, optimizer in enumerate(self.each):
                index = {id(parameter): i for i, parameter in enumerate(self._parameters[replica])}
                for group in optimizer.param_groups:
                    group["params"] = [p for p in group["params"] if owners[index[id(p)]] == replica]

    def _indices(self, replica: int) -> list[list[int]]:
        """Per group its parameters' indices in the module."""
        index = {id(parameter): i for i, parameter in enumerate(self._parameters[replica])}
        try:
            return [[index[id(p)] for p in group["params"]] for group in self.each[replica].param_groups]
        except KeyError:
            raise ReplicaError(
                "optimizer= must use the parameters it is given, of every replica its own; it holds others"
            ) from None

    def copy_groups(self) -> None:
        """The first optimizer's settings (learning rates ...) to the others; tensors by value."""
        first = self.each[0].param_groups
        for optimizer in self.each[1:]:
            if len(optimizer.param_groups) != len(first):
                raise ReplicaError(
                    f"the first optimizer has {len(first)} parameter groups, the others "
                    f"{len(optimizer.param_groups)}: make all groups in optimizer="
                )
            for mine, its in zip(first, optimizer.param_groups, strict=True):
                for key, value in mine.items():
                    if key == "params":
                        continue
                    old = its.get(key)
                    if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor):
                        old.copy_(value)
                    else:
                        its[key] = value.clone() if isinstance(value, torch.Tensor) else value

    def unscale(self, scaler: GradScaler) -> bool:
        """Divide all gradients by the scale, in place; whether they are finite (on every replica alike)."""
        if not scaler.is_enabled():
            return True
        found: list[torch.Tensor] = []
        for optimizer in self.each:
            scaler.unscale_(optimizer)
            if not found or self._owners is not None:  # replicas hold equal gradients: one verdict for all
                found.extend(scaler._found_inf_per_device(optimizer).values())
        return not any(bool(flag.item()) for flag in found)

    def clip(self, limit: float) -> torch.Tensor:
        """Scale gradients to a total norm of at most `limit`; the norm before, on the first device."""
        first = self._parameters[0][0].device
        owned = self._parameters if self._owners is not None else self._parameters[:1]
        norms = []
        for given in owned:
            grads = [parameter.grad for parameter in given if parameter.grad is not None]
            if grads:
                norms.append(get_total_norm(grads).to(first))
        total = (
            norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms or [torch.zeros(())]))
        )
        for given in self._parameters:
            if given:
                clip_grads_with_norm_(given, limit, total.to(given[0].device))
        return total

    def state_dict(self) -> dict[str, Any]:
        """As of one optimizer over the whole module."""
        if self._owners is None:
            return self.each[0].state_dict()
        states = [optimizer.state_dict() for optimizer in self.each]
        merged: dict[str, Any] = {"state": {}, "param_groups": []}
        place = 0
        for number, indices in enumerate(self._layout):
            left = [iter(state["param_groups"][number]["params"]) for state in states]
            packed = []
            for index in indices:
                owner = self._owners[index]
                own = next(left[owner])
                if own in states[owner]["state"]:
                    merged["state"][place] = states[owner]["state"][own]
                packed.append(place)
                place += 1
            merged["param_groups"].append({**states[0]["param_groups"][number], "params": packed})
        return merged

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of one optimizer into all; every replica gets tensors of its own.

        Raises:
            StateError: the groups do not fit.
        """
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes != [len(indices) for indices in self._layout]:
            raise StateError(
                f"the optimizer state has parameter groups of {sizes} parameters, this optimizer of "
                f"{[len(indices) for indices in self._layout]}"
            )
        for replica, optimizer in enumerate(self.each):
            optimizer.load_state_dict(copy.deepcopy(self._part_of(state, replica)))

    def _part_of(self, state: dict[str, Any], replica: int) -> dict[str, Any]:
        if self._owners is None:
            return state
        part: dict[str, Any] = {"state": {}, "param_groups": []}
        place = 0
        for indices, group in zip(self._layout, state["param_groups"], strict=True):
            packed = []
            for index, known in zip(indices, group["params"], strict=True):
                if self._owners[index] == replica:
                    if known in state["state"]:
                        part["state"][place] = state["state"][known]
                    packed.append(place)
                    place += 1
            part["param_groups"].append({**group, "params": packed})
        return part


def _refuse_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ReplicaError(
            f"{type(optimizer).__name__} needs a closure that evaluates the model again, which a step over "
            "replicas cannot give it: use an optimizer whose step() takes none"
        )


def zero_grads(parameters: Sequence[Sequence[Parameter]]) -> None:
    """Set every gradient to None."""
    for given in parameters:
        for parameter in given:
            parameter.grad = None
