"""Backward passes outside ``step``: the first gradient begins a reduction, the end completes it.

Any backward counts that reaches a parameter of a replica: through the gathered outputs, through activations that a
hook has stored, through a penalty on gradients. What only returns gradients (``torch.autograd.grad``, or
``backward(inputs=...)``) would produce only the first replica's share of them, and is refused.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from pipegraph import concurrency
from pipegraph.device.split import leaves
from pipegraph.errors import ReplicaError

GONE = "the executor was closed, or nobody held it any more, before this backward: make gradients while it is open"


class Outside:
    """Finds the beginning and the end of the user's own backwards.

    `busy` and `syncing` are the executor's: while it is busy, gradients belong to what it does. The lock
    guards `_finish`: at most one reduction is under way.

    Args:
        parameters: per replica.
        begin: begins a reduction of all replicas' gradients.
        finish: completes it; afterwards the first replica holds the sums.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Parameter]],
        begin: Callable[[], None],
        finish: Callable[[], None],
    ) -> None:
        self._parameters = parameters
        self._begin = begin
        self._complete = finish
        self._lock = concurrency.Lock()
        self._finish: weakref.ref[Callable[[], None]] | None = None
        self._process = os.getpid()
        self._armed = False
        self._guards: dict[int, RemovableHandle] = {}
        self._checked = -1
        self._reached: tuple[int, set[int]] = (-1, set())
        self._arrived: set[int] = set()
        self._dirty = False
        self.busy = False
        self.syncing = True

    def arm(self, outputs: Mapping[int, Any], joined: Any) -> None:
        """The executor was called with gradients on: from now on the user's backwards are followed.

        Args:
            outputs: by replica, what it has returned.
            joined: what the user gets.
        """
        self._armed = True
        for index, parameter in enumerate(self._parameters[0]):
            if parameter.requires_grad and index not in self._guards:
                self._guards[index] = parameter.register_hook(self._guard_of(parameter))  # type: ignore
        made = {replica for replica, tree in outputs.items() if _made(tree)}
        for leaf in _made(joined):
            leaf.register_hook(lambda grad: self._passes(made))  # type: ignore[no-untyped-call]

    def take_dirty(self) -> bool:
        """Whether gradients have arrived while the executor was busy with a plain call."""
        dirty, self._dirty = self._dirty, False
        return dirty

    def arrive(self, replica: int) -> bool:
        """From a hook, when no reduction is open: begin one if this is a backward of the user's.

        Returns:
            Whether a reduction is open now.
        """
        if os.getpid() != self._process:  # a forked child has the hooks, and none of the threads
            return False
        if self.busy:
            self._dirty = True
            return False
        if not (self._armed and self.syncing):
            return False
        with self._lock:
            if self._finish is None or self.failed:
                self._start()
        return True

    @property
    def under_way(self) -> bool:
        """Whether a backward of the user's has begun a reduction, and has not completed it."""
        return self._finish is not None

    @property
    def failed(self) -> bool:
        """Whether that backward has failed: the engine, which alone knows its end, has forgotten it."""
        finish = self._finish
        return finish is not None and finish() is None

    def forget(self) -> None:
        with self._lock:
            self._finish = None

    def note(self, replica: int) -> None:
        """A replica has produced a gradient for the running reduction."""
        self._arrived.add(replica)

    def _start(self) -> None:
        task = torch._C._current_graph_task_id()

        def finish() -> None:
            self._finish = None
            self._complete()
            self._refuse_partial(task)

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(finish)
        self._arrived = set()
        self._finish = weakref.ref(finish)
        self._begin()

    def _passes(self, replicas: set[int]) -> None:
        """A backward passes through what these replicas have returned."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            if self._reached[0] != task:
                self._reached = (task, set())
            self._reached[1].update(replicas)

    def _refuse_partial(self, task: int) -> None:
        passed_by, passed = self._reached
        missing = passed - self._arrived
        if passed_by == task and 0 in self._arrived and missing:
            raise ReplicaError(
                f"this backward gave the first replica gradients and replica {min(missing)} none: "
                "backward(inputs=...) with the executor's parameters computes the first replica's share only; leave "
                "inputs= out, and freeze what is to have no gradient"
            )

    def _guard_of(self, parameter: Parameter) -> Callable[[torch.Tensor], None]:
        def guard(grad: torch.Tensor) -> None:
            task = torch._C._current_graph_task_id()
            if self.busy or task == self._checked or os.getpid() != self._process:
                return
            if _captured(parameter):
                raise ReplicaError(
                    "torch.autograd.grad with respect to the executor's parameters would give the first replica's "
                    "share: use backward(), which sums over the replicas, or make it in the loss of step()"
                )
            self._checked = task

        return guard

    def disarm(self) -> None:
        """Take the guards off, and let the reducer go."""
        self._armed = False
        self._begin = self._complete = refuse_gone
        for handle in self._guards.values():
            handle.remove()
        self._guards = {}


def _made(tree: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]


def _captured(parameter: Parameter) -> bool:
    """Whether the running autograd call returns this parameter's gradient in place of accumulating it."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # "a leaf node was passed ... but we are currently running autograd.grad()"
        return True
    return False


def refuse_gone(*_: torch.Tensor) -> None:
    """The reduction, and the hook of replicas, once the executor is gone."""
    raise ReplicaError(GONE)
