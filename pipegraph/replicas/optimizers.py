"""One optimizer per replica, behaving as one: schedule A (all step) and B (each steps what it owns)."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module, Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from pipegraph.errors import ReplicaError, StateError
from pipegraph.replicas.attributes import copied

Factory = Callable[[Any], Any]

_CPU = torch.device("cpu")


class OneOptimizer:
    """The replicas' copies of one optimizer.

    Args:
        parameters: by replica, all of the module's.
        owners: the replica that steps each parameter, whole ones (schedule B); None where all step all.

    Attributes:
        groups: the settings, with the first replica's parameters: what users and schedulers change.

    Raises:
        ReplicaError: the optimizer needs a closure, or holds other parameters than the replica's.
    """

    def __init__(
        self,
        each: Sequence[Optimizer],
        parameters: Sequence[Sequence[Parameter]],
        owners: Sequence[int] | None,
    ) -> None:
        _refuse_closure(each[0])
        self.each = list(each)
        self._parameters = parameters
        self._owners = owners
        self._index = {id(parameter): i for i, parameter in enumerate(parameters[0])}
        self._layout = self._indices(0)
        if any(self._indices(replica) != self._layout for replica in range(1, len(each))):
            raise ReplicaError("optimizer= made different parameter groups for different replicas")
        self._touched = False
        self._states: MutableMapping[Any, Any] = {}
        self.groups = self.each[0].param_groups
        if owners is not None:
            self.groups = [dict(group) for group in self.groups]
            for replica, optimizer in enumerate(self.each):
                self._keep_owned(replica, optimizer, owners)

    def _keep_owned(self, replica: int, optimizer: Optimizer, owners: Sequence[int]) -> None:
        for group, indices in zip(optimizer.param_groups, self._layout, strict=True):
            group["params"] = [self._parameters[replica][i] for i in indices if owners[i] == replica]
        # Some optimizers make their state at once, for all they are given.
        for index, parameter in enumerate(self._parameters[replica]):
            if owners[index] != replica:
                optimizer.state.pop(parameter, None)

    def _indices(self, replica: int) -> list[list[int]]:
        """Per group its parameters' indices in the module."""
        index = {id(parameter): i for i, parameter in enumerate(self._parameters[replica])}
        try:
            return [[index[id(p)] for p in group["params"]] for group in self.each[replica].param_groups]
        except KeyError:
            raise ReplicaError(
                "optimizer= must use the parameters it is given, of every replica its own; it holds others"
            ) from None

    @property
    def indices(self) -> set[int]:
        """Of the parameters it steps."""
        return {index for group in self._layout for index in group}

    # What users change, and the replicas follow

    def align(self) -> None:
        """Before a step: settings (learning rates ...) to all, tensors by value; states that users may have changed."""
        for optimizer in self.each:
            if optimizer.param_groups is not self.groups:
                self._take_settings(self.groups, optimizer.param_groups)
        self._take_members()
        if self._touched:
            self._give_states()
            self._touched = False

    def settings_from_step(self) -> None:
        """After a step, or a load: what the optimizer has changed in its own settings."""
        if self.groups is not self.each[0].param_groups:
            self._take_settings(self.each[0].param_groups, self.groups)

    def _take_settings(self, source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        if len(target) != len(source):
            raise ReplicaError(
                f"the first optimizer has {len(source)} parameter groups, the others "
                f"{len(target)}: make all groups in optimizer="
            )
        for mine, its in zip(source, target, strict=True):
            for key, value in mine.items():
                if key == "params":
                    continue
                old = its.get(key)
                if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor):
                    if old is not value:
                        old.copy_(value)
                else:
                    its[key] = value.clone() if isinstance(value, torch.Tensor) else value

    def _take_members(self) -> None:
        """Parameters that users have taken out of a group, or moved to another."""
        try:
            layout = [[self._index[id(p)] for p in group["params"]] for group in self.groups]
        except KeyError:
            layout = None
        if layout == self._layout:
            return
        if layout is None or not {i for group in layout for i in group} <= self.indices:
            raise ReplicaError(
                "param_groups were given a parameter that optimizer= did not give them: build a new executor, whose "
                "optimizer= makes all groups"
            )
        self._layout = layout
        for replica, optimizer in enumerate(self.each):
            for group, indices in zip(optimizer.param_groups, layout, strict=True):
                owned = [i for i in indices if self._owners is None or self._owners[i] == replica]
                group["params"] = [self._parameters[replica][i] for i in owned]

    def state(self) -> MutableMapping[Any, Any]:
        """By parameter of the first replica, wherever it lies: from now on in a user's hands."""
        self._states = self._joined()
        self._touched = True
        return self._states

    def _joined(self) -> MutableMapping[Any, Any]:
        first = self.each[0].state
        if self._owners is None:
            return first
        if self._touched:
            return self._states
        joined = defaultdict(dict, {key: value for key, value in first.items() if id(key) not in self._index})
        for index in [i for group in self._layout for i in group]:
            owner = self._owners[index]
            own = self._parameters[owner][index]
            if own in self.each[owner].state:
                joined[self._parameters[0][index]] = self.each[owner].state[own]
        return joined

    def _give_states(self) -> None:
        """What was in a user's hands: to the owners, or from the first replica to the others."""
        if self._owners is not None:
            for index, owner in enumerate(self._owners):
                self.each[owner].state.pop(self._parameters[owner][index], None)
            for key, value in self._states.items():
                index = self._index.get(id(key), -1)
                owner = 0 if index < 0 else self._owners[index]
                self.each[owner].state[key if index < 0 else self._parameters[owner][index]] = value
            return
        for optimizer, given in zip(self.each[1:], self._parameters[1:], strict=True):
            memo: dict[int, Any] = {
                id(mine): its for mine, its in zip(self._parameters[0], given, strict=True)
            }
            source, target = self._parameters[0][0].device, given[0].device
            state = copied(dict(self.each[0].state), source, target, memo)
            optimizer.state.clear()
            optimizer.state.update(state)

    # A step

    def unscale(self, scaler: GradScaler) -> bool:
        """Divide all gradients by the scale, in place; whether they are finite (on every replica alike)."""
        found: list[torch.Tensor] = []
        for optimizer in self.each:
            scaler.unscale_(optimizer)
            if not found or self._owners is not None:  # replicas hold equal gradients: one verdict for all
                found.extend(scaler._found_inf_per_device(optimizer).values())
        return not any(bool(flag.item()) for flag in found)

    def forget_scaling(self, scaler: GradScaler) -> None:
        """After a failure: the scaler holds nothing of the step that was dropped, or it would refuse the next."""
        for optimizer in self.each:
            scaler._per_optimizer_states.pop(id(optimizer), None)

    def zero_grad(self) -> None:
        """Drop the gradients of what it steps, on all replicas."""
        for given in self._parameters:
            for index in self.indices:
                given[index].grad = None

    # States

    def state_dict(self) -> dict[str, Any]:
        """As of one optimizer over the whole module."""
        first = self.each[0]
        if self._owners is None:
            return first.state_dict()
        whole = object.__new__(type(first))
        vars(whole).update(vars(first), param_groups=self.groups, state=self._joined())
        return whole.state_dict()

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises StateError if the groups of a state do not fit."""
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes != [len(indices) for indices in self._layout]:
            raise StateError(
                f"the optimizer state has parameter groups of {sizes} parameters, this optimizer of "
                f"{[len(indices) for indices in self._layout]}"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the checked state of one optimizer into all; every replica gets tensors of its own."""
        self._touched = self._owners is None  # until all have it, the next step gives all what the first has
        for replica, optimizer in enumerate(self.each):
            optimizer.load_state_dict(copied(self._part_of(state, replica), _CPU, _CPU, {}))
        if self._owners is None:
            self.groups = self.each[0].param_groups
        self.settings_from_step()
        self._touched = False

    def _part_of(self, state: Mapping[str, Any], replica: int) -> dict[str, Any]:
        if self._owners is None:
            return dict(state)
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


class ReplicaOptimizers:
    """All that ``optimizer=`` has made: one optimizer, or several.

    Args:
        factory: gets a replica's parameters as a list, or the replica itself when its
            parameter is named ``module``; returns an optimizer, or a sequence of them.
        owners: the replica that steps each parameter (schedule B); None where all step all.
    """

    def __init__(self, factory: Factory, modules: Sequence[Module], owners: Sequence[int] | None) -> None:
        by_name = "module" in inspect.signature(factory).parameters
        self._parameters = [list(module.parameters()) for module in modules]
        made = [
            factory(module if by_name else list(given))
            for module, given in zip(modules, self._parameters, strict=True)
        ]
        self._owners = owners
        self.several = not isinstance(made[0], Optimizer)
        columns = list(zip(*made, strict=True)) if self.several else [made]
        self.parts = [OneOptimizer(column, self._parameters, owners) for column in columns]
        known = [index for part in self.parts for index in part.indices]
        if len(known) > len(set(known)):
            raise ReplicaError("optimizer= made several optimizers that step the same parameter")

    @property
    def indices(self) -> set[int]:
        """Of all parameters that an optimizer steps."""
        return {index for part in self.parts for index in part.indices}

    def unscale(self, scaler: GradScaler) -> bool:
        """Unscale all gradients; whether all are finite."""
        verdicts = [part.unscale(scaler) for part in self.parts] if scaler.is_enabled() else []
        return all(verdicts)

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

    def state_dict(self) -> Any:
        """Of the optimizer, or a list where there are several."""
        states = [part.state_dict() for part in self.parts]
        return states if self.several else states[0]

    def check(self, state: Any) -> None:
        """Raises StateError if the state does not fit."""
        states = self._listed(state)
        if len(states) != len(self.parts):
            raise StateError(f"the state holds {len(states)} optimizers, this executor has {len(self.parts)}")
        for part, its in zip(self.parts, states, strict=True):
            part.check(its)

    def load_state_dict(self, state: Any) -> None:
        for part, its in zip(self.parts, self._listed(state), strict=True):
            part.load_state_dict(its)

    def _listed(self, state: Any) -> list[Any]:
        return [state] if isinstance(state, Mapping) else list(state)


def _refuse_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ReplicaError(
            f"{type(optimizer).__name__} needs a closure that evaluates the model again, which a step over "
            "replicas cannot give it: use an optimizer whose step() takes none"
        )
