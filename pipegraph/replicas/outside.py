"""Backward passes outside ``step``: the first gradient begins a reduction, the end completes it.

Any backward counts that reaches a parameter of a replica: through the gathered outputs, through activations that a
hook has stored, through a penalty on gradients. What only returns gradients (``torch.autograd.grad``, or
``backward(inputs=...)``) would produce only the first replica's share of them, and is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from pipegraph import concurrency
from pipegraph.device.backend import Backend
from pipegraph.device.split import leaves
from pipegraph.errors import ReplicaError
from pipegraph.replicas.usage import Usage

GONE = "the executor was closed, or nobody held it any more, before this backward: make gradients while it is open"


class OwnHook(partial[Any]):
    """A tensor hook of the executor's own, beside which those of users are found."""


class Outside:
    """Finds the beginning and the end of the user's own backwards.

    The lock guards `_finish`: at most one reduction is under way. The engine alone knows the end of a backward, and
    holds `finish` until then: a backward that has failed is one whose `finish` is gone.

    Args:
        parameters: per replica.
        names: of the parameters, for messages.
        begin: begins a reduction of all replicas' gradients.
        finish: completes it; afterwards the first replica holds the sums.
        usage: of the executor: while it is busy, gradients belong to what it does. None: they always do.
        backends: of the replicas' devices.

    Attributes:
        under_way: a backward of the user's has begun a reduction, and has not completed it.
        unfinished: a backward through what the executor has returned has begun, and has not reached its end: it runs,
            or has failed.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Parameter]],
        names: Sequence[str],
        begin: Callable[[], None],
        finish: Callable[[], None],
        usage: Usage | None,
        backends: Mapping[torch.device, Backend],
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._begin = begin
        self._complete = finish
        self._usage = usage
        self._backends = backends
        self._lock = concurrency.Lock()
        self.under_way = False
        self._finish: weakref.ref[Callable[[], None]] | None = None
        self._guards: dict[int, RemovableHandle] = {}
        self._checked = -1
        self._reached: tuple[int, set[int]] = (-1, set())
        self.unfinished = False
        self._arrived: set[int] = set()
        self._dirty = False
        # Gradients of the first replica that the others' add to, by parameter, as the last hook has seen them.
        self._marks: dict[int, tuple[int, int]] = {}
        self._accumulated = False

    @property
    def busy(self) -> bool:
        """Whether gradients belong to a call of the executor's."""
        return self._usage is None or self._usage.busy

    def arm(self, outputs: Mapping[int, Any], joined: Any) -> None:
        """The executor was called with gradients on: from now on the user's backwards are followed."""
        for index, parameter in enumerate(self._parameters[0]):
            if parameter.requires_grad and index not in self._guards:
                guard = OwnHook(self._guard, parameter)
                self._guards[index] = parameter.register_hook(guard)  # type: ignore[no-untyped-call]
        made = {replica for replica, tree in outputs.items() if _made(tree)}
        for leaf in _made(joined):
            leaf.register_hook(lambda grad: self._passes(made))  # type: ignore[no-untyped-call]

    def take_dirty(self) -> bool:
        """Whether gradients have arrived while the executor was busy with a plain call."""
        dirty, self._dirty = self._dirty, False
        return dirty

    def arrive(self) -> bool:
        """From a hook, when the executor does nothing: begin a reduction, or continue it.

        Returns:
            Whether a reduction is open now.

        Raises:
            ReplicaError: a backward or call before has failed, and what it has left is not cleared away yet.
        """
        if self._usage is None or not self._usage.here:
            return False  # a forked child has the hooks, and none of the threads
        if not (self._guards and self._usage.syncing):
            return False
        with self._lock:
            if self.failed or self._usage.torn:
                raise ReplicaError(
                    "a backward has failed, or a call was interrupted, since the graph of this backward was made: "
                    "call the executor again first, which begins anew"
                )
            if self._finish is None:
                self._start()
        return True

    @property
    def failed(self) -> bool:
        """Whether that backward has failed."""
        finish = self._finish
        return self.under_way and (finish is None or finish() is None)

    def note(self, replica: int, index: int, grad: torch.Tensor) -> None:
        """A replica has produced a gradient for the running reduction."""
        self._arrived.add(replica)
        self._mark(replica, index, grad)

    def accumulated(self, replica: int, index: int, grad: torch.Tensor) -> None:
        """A replica has a gradient that is not reduced now."""
        self._dirty = self._dirty or self.busy
        self._accumulated = True
        self._mark(replica, index, grad)

    def _mark(self, replica: int, index: int, grad: torch.Tensor) -> None:
        if replica == 0:
            self._marks[index] = (id(grad), grad._version)

    def settle(self) -> None:
        """Before a call: wait for what a backward that has failed left running.

        The engine raises at once, while its threads of other devices may be inside a function: that would still read
        the weights, and give its gradient later. A thread does one function after the other, so it has left that one
        once a backward of our own has gone through it.
        """
        if not self.unfinished or torch._C._current_graph_task_id() != -1:
            return
        with torch.inference_mode(False), torch.enable_grad():
            for device in {device for device in self._backends if device.type != "cpu"}:
                torch.zeros((), device=device, requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]
        for backend in self._backends.values():
            backend.synchronize()
        self.unfinished = False

    def clear(self) -> None:
        """Before a call: the other replicas hold no gradients but those that were accumulated, and are still wanted.

        ``model.zero_grad()`` drops the first replica's alone; the others' go with them here.

        Raises:
            ReplicaError: a parameter has a tensor hook; the first replica's gradients are what a failed backward has
                left, or were written by the user where the others' are yet to be added.
        """
        self._refuse_hooks()
        first = self._parameters[0]
        dropped = []
        for index, mark in self._marks.items():
            grad = first[index].grad
            if grad is None or (mark != (id(grad), grad._version) and not grad.detach().to_dense().any()):
                dropped.append(index)
            elif self.failed:
                raise ReplicaError(
                    f"a backward has failed half-way, and the gradient of {self._names[index]!r} and others hold what "
                    "it has left: drop them with zero_grad()"
                )
            elif mark != (id(grad), grad._version):
                raise ReplicaError(
                    f"the gradient of {self._names[index]!r} was written between accumulating calls, where it is the "
                    "first replica's share only: change gradients after a backward outside no_sync()"
                )
        for index in dropped:
            del self._marks[index]
        if not self._accumulated or self.failed or (dropped and not self._marks):
            self._accumulated = self._dirty = False
            self._marks = {}
            dropped = list(range(len(first)))
        for given in self._parameters[1:]:
            for index in dropped:
                given[index].grad = None

    def settled(self) -> None:
        """The first replica's gradients are sums now, and the others have none."""
        self._accumulated, self._marks = False, {}

    def renew(self) -> None:
        """After :meth:`clear`: no backward is under way."""
        self.under_way = False
        self._finish = None

    def _refuse_hooks(self) -> None:
        for name, parameter in zip(
            self._names, self._parameters[0] if self._parameters[1:] else (), strict=False
        ):
            for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
                if hooks and not all(isinstance(hook, OwnHook) for hook in hooks.values()):
                    raise ReplicaError(
                        f"parameter {name!r} was given a tensor hook after the executor was built, which would see the "
                        "first replica's share of the gradient only: remove it, and use a hook of the module, or "
                        "change gradients after the backward"
                    )

    def _start(self) -> None:
        self._refuse_hooks()
        task = torch._C._current_graph_task_id()

        def finish() -> None:
            self._complete()
            self.under_way, self._finish = False, None
            self._refuse_partial(task)

        self.under_way = True
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
                self.unfinished = True
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._reaches_its_end)
            self._reached[1].update(replicas)

    def _reaches_its_end(self) -> None:
        self.unfinished = False

    def _refuse_partial(self, task: int) -> None:
        passed_by, passed = self._reached
        missing = passed - self._arrived
        if passed_by == task and 0 in self._arrived and missing:
            raise ReplicaError(
                f"this backward gave the first replica gradients and replica {min(missing)} none: "
                "backward(inputs=...) with the executor's parameters computes the first replica's share only; leave "
                "inputs= out, and freeze what is to have no gradient"
            )

    def _guard(self, parameter: Parameter, grad: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if self.busy or task == self._checked or not (self._usage and self._usage.here):
            return
        if _captured(parameter):
            raise ReplicaError(
                "torch.autograd.grad with respect to the executor's parameters would give the first replica's "
                "share: use backward(), which sums over the replicas, or make it in the loss of step()"
            )
        self._checked = task

    def disarm(self) -> None:
        """Take the guards off, and let the reducer go."""
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
