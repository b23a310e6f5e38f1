"""The optimizer that users hold; it acts on every replica's."""

from __future__ import annotations

import functools
import weakref
from collections.abc import MutableMapping
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from pipegraph.errors import ReplicaError
from pipegraph.replicas.optimizers import OneOptimizer

#: What belongs to the proxy itself: its own parts, and what learning-rate schedulers put on an optimizer.
_OWN = ("_parts", "_executor", "step", "_opt_called")


class JointOptimizer(Optimizer):
    """The optimizers of all replicas as one: schedulers attach to it, and what is done to it is done to all.

    ``param_groups`` holds the first replica's parameters; settings changed there, schedulers included, are copied
    to the others before the next step. Methods are called on every replica's optimizer, and return what the first's
    returns; step hooks run once per replica, with that replica's optimizer. ``step()`` is for a training loop of your
    own, after ``executor(...)`` and ``backward()``; ``executor.step`` makes the step itself.
    """

    _parts: OneOptimizer
    _executor: weakref.ref[Any]
    _opt_called: bool

    def __init__(self, parts: OneOptimizer, executor: Any) -> None:
        # Not Optimizer's own, which would make new groups. Schedulers hold this, and not the executor with its threads.
        self._parts = parts
        self._executor = weakref.ref(executor)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._parts.groups

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]:  # type: ignore[override]
        """By parameter of the first replica. What you change in an entry reaches all replicas with the next step."""
        return self._parts.state()

    def step(self, closure: Any = None) -> Any:
        """Sum the gradients of all replicas, and step every replica's optimizer. Gradients stay until zero_grad()."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        executor = self._executor()
        if executor is None:
            raise ReplicaError("the executor of this optimizer is gone")
        executor._step_outside(self._parts)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._parts.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """As of one optimizer over the whole model."""
        return self._parts.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._parts.check(state_dict)
        self._parts.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        raise ReplicaError(
            "make all parameter groups in optimizer=: they are fixed once the executor is built"
        )

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Called once per replica, with its own optimizer."""
        return _Handles([each.register_step_pre_hook(hook) for each in self._parts.each])

    def register_step_post_hook(self, hook: Any) -> Any:
        """Called once per replica, with its own optimizer."""
        return _Handles([each.register_step_post_hook(hook) for each in self._parts.each])

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):
            raise AttributeError(name)
        first = getattr(self._parts.each[0], name)
        if not callable(first) or getattr(first, "__self__", None) is not self._parts.each[0]:
            return first

        @functools.wraps(first)
        def on_all(*args: Any, **kwargs: Any) -> Any:
            returned = [getattr(each, name)(*args, **kwargs) for each in self._parts.each]
            return returned[0]

        return on_all

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        elif name in ("param_groups", "state"):
            raise ReplicaError(
                f"optimizer.{name} cannot be exchanged: change its entries, or load_state_dict()"
            )
        else:
            for each in self._parts.each:
                setattr(each, name, value)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ReplicaError("the optimizer of an executor cannot be copied or pickled: use its state_dict()")

    def __repr__(self) -> str:
        return f"<{type(self._parts.each[0]).__name__} on {len(self._parts.each)} replicas>"


class _Handles:
    """What registering a hook on several optimizers returns."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
