"""Runs forward, loss and backward on all replicas."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module

from pipegraph.device.split import map_tree
from pipegraph.errors import PipegraphWarning
from pipegraph.replicas.build import Replicas
from pipegraph.replicas.feed import ReplicaFeed
from pipegraph.replicas.losses import Reduction, shares
from pipegraph.replicas.replica_threads import no_autocast
from pipegraph.replicas.replicate import replicate
from pipegraph.replicas.runner import ReplicaRunner, forked_seed, replica_seed

PREFIX = "_orig_mod."
"""What ``torch.compile`` puts before the names of a module."""

#: ``forward(module, part)``
Forward = Callable[[Callable[..., Any], Any], Any]
#: ``loss(outputs, part)``
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has come to.

    Attributes:
        loss: of the whole batch, as one device would have returned it; 0-dim, detached, on the first device.
        outputs: one entry per replica that had rows, detached, where it was computed; None unless asked for.
        grad_norm: the total gradient norm before clipping; None without ``clip_norm``.
    """

    loss: torch.Tensor
    outputs: tuple[Any, ...] | None = None
    grad_norm: torch.Tensor | None = None


def as_it_is(module: Callable[..., Any], part: Any) -> Any:
    """The default ``forward``."""
    return module(part)


class Calls:
    """What is called of each replica, and how: at the same time, or in turn and seeded.

    Args:
        module: the first replica as the user holds it.
        wrap: how the user had wrapped (compiled) the model, if so.
        deterministic: run the replicas one after another, each seeded by (seed, call, replica).

    Attributes:
        count: calls so far.
    """

    def __init__(
        self,
        runner: ReplicaRunner,
        module: Module,
        replicas: Replicas,
        wrap: Callable[[Module], Callable[..., Any]] | None,
        deterministic: bool,
    ) -> None:
        self._runner = runner
        self._replicas = replicas
        self._module = module
        self._each = _callables(module, replicas.modules, wrap)
        self._seen_shapes: set[object] | None = None if wrap is None else set()
        self._deterministic = deterministic
        self._seed = torch.initial_seed()
        self.count = 0
        runner.seed_devices(self._seed)
        if deterministic:
            runner.stop_watching()

    def outputs(self, feed: ReplicaFeed) -> dict[int, Any]:
        """Call functional replicas, each with its arguments: autograd adds their gradients to the model's own."""
        modules = self._functional(len(feed.fetch))

        def call(replica: int) -> Any:
            args, kwargs = self._fetched(feed, replica)
            return modules[replica](*args, **kwargs)

        return self._forward(call, feed)[0]

    def _functional(self, count: int) -> Sequence[Module]:
        if count == 1:
            return [self._module]
        modules = replicate(self._replicas.modules[0], [slot.device for slot in self._runner.slots[:count]])
        for replica, module in enumerate(modules):
            self._runner.reads(replica, [*module.parameters(), *module.buffers()])
        return modules

    def backward(
        self,
        feed: ReplicaFeed,
        forward: Forward,
        loss: Loss,
        reduction: Reduction,
        scaler: GradScaler | None,
        outputs: bool,
    ) -> tuple[torch.Tensor, tuple[Any, ...] | None]:
        """Forward, losses and backward of all replicas; the whole loss, and the outputs if asked for."""

        def call(replica: int) -> Any:
            part = self._fetched(feed, replica)
            made = forward(self._each[replica], part)
            return made, loss(made, part)

        made, serial = self._forward(call, feed)
        values = {r: value for r, (_, value) in made.items()}
        scaled, total = shares(values, dict(enumerate(feed.rows)), reduction, self._runner.slots[0].device)
        kept = tuple(map_tree(_detached, given) for given, _ in made.values()) if outputs else None
        del made, values
        if scaler is not None:
            scaled = {r: scaler.scale(share) for r, share in scaled.items()}
        with no_autocast():
            self._runner.run({r: share.backward for r, share in scaled.items()}, serial)
        return total, kept

    def _fetched(self, feed: ReplicaFeed, replica: int) -> Any:
        part = feed.fetch[replica]()
        self._runner.reads(replica, part)
        return part

    def _forward(self, call: Callable[[int], Any], feed: ReplicaFeed) -> tuple[dict[int, Any], bool]:
        """Call each replica that has a part; also whether this call's replicas go one after another."""
        count, backends = self.count, list(self._runner.backends.values())

        def job(replica: int) -> Any:
            if not self._deterministic:
                return call(replica)
            with forked_seed(replica_seed(self._seed, count, replica), backends):
                return call(replica)

        serial = self._deterministic
        if self._seen_shapes is not None:
            # A compiler's first run for a shape is not made by several threads at once.
            shapes = (feed.shapes(), self._module.training, torch.is_grad_enabled())
            serial = serial or shapes not in self._seen_shapes
            self._seen_shapes.add(shapes)
        self.count += 1
        return self._runner.run_watched({r: partial(job, r) for r in range(len(feed.fetch))}, serial), serial


def _callables(
    module: Module,
    modules: list[Module],
    wrap: Callable[[Module], Callable[..., Any]] | None,
) -> list[Callable[..., Any]]:
    if wrap is None:
        return list(modules)
    if len(modules) > 1:
        warnings.warn(
            "the model is compiled as a whole: all its gradients come at the end of backward, so their reduction "
            "overlaps with nothing",
            PipegraphWarning,
            stacklevel=4,
        )
    return [module, *(wrap(each) for each in modules[1:])]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def unwrapped(model: Module) -> tuple[Module, Callable[[Module], Callable[..., Any]] | None]:
    """The module inside ``torch.compile``'s wrapper, and how to wrap copies alike (None without one)."""
    if "_orig_mod" not in model._modules:
        return model, None  # without loading the compiler, which takes seconds
    from torch._dynamo.eval_frame import OptimizedModule

    assert isinstance(model, OptimizedModule)
    context = model.dynamo_ctx
    return model._orig_mod, lambda copy: OptimizedModule(copy, context)


def own_keys(state: Mapping[str, Any], module: Module) -> dict[str, Any]:
    """A state with plain keys under the keys that `module` has, whose submodules may be compiled."""
    known = {key.replace(PREFIX, ""): key for key in module.state_dict()}
    return {known.get(key, key): value for key, value in plain_keys(state).items()}


def plain_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state's keys without the compiler's prefix."""
    return {key.replace(PREFIX, ""): value for key, value in state.items()}
