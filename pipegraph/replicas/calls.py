"""Runs forward, loss and backward on all replicas; scales the losses *before* backward, so that gradients add up to one
loss's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module

from pipegraph.device.backend import sent
from pipegraph.device.split import map_tree
from pipegraph.errors import PipegraphWarning, ReplicaError
from pipegraph.replicas.build import Replicas
from pipegraph.replicas.replica_threads import no_autocast
from pipegraph.replicas.replicate import replicate
from pipegraph.replicas.runner import ReplicaRunner, forked_seed, replica_seed
from pipegraph.replicas.scatter import ReplicaFeed

Reduction = Literal["mean", "sum"]


def shares(
    values: Mapping[int, Any], rows: Mapping[int, int | None], reduction: Reduction, device: torch.device
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Scaled losses by replica, whose gradients simply add up, and the loss of the whole batch.

    A mean counts with its part's rows; a sum as it is; a pair ``(total, weight)`` gives the sum of totals
    over the sum of weights, which alone is right where rows weigh differently (class weights,
    ``ignore_index``). Weights stay on their devices: no value is read by the host.

    Args:
        values: by replica what ``loss`` returned.
        rows: by replica the rows of its part.
        reduction: of a loss that is no pair.
        device: of the second result.

    Raises:
        ReplicaError: a value is no 0-dim tensor and no pair, or the replicas returned different kinds.
    """
    if reduction not in ("mean", "sum"):
        raise ReplicaError(
            f"reduction must be 'mean' or 'sum', got {reduction!r}; for other weights return a pair"
        )
    pairs = {replica: _pair(value) for replica, value in values.items()}
    if len({pair is None for pair in pairs.values()}) > 1:
        raise ReplicaError("loss returned a pair (total, weight) on some replicas and a plain loss on others")
    scaled: dict[int, torch.Tensor] = {}
    if None not in pairs.values():
        weights = {replica: pair[1] for replica, pair in pairs.items() if pair is not None}
        for replica, pair in pairs.items():
            assert pair is not None
            scaled[replica] = pair[0] / _sum(list(weights.values()), pair[0].device)
    else:
        for value in values.values():
            _check(value)
        if reduction == "sum" or len(values) == 1:
            # One part that is the whole batch is left as it is, to the last bit.
            scaled = dict(values)
        else:
            counts = {replica: rows[replica] or 0 for replica in values}
            whole = sum(counts.values())
            if not whole or None in rows.values():
                raise ReplicaError(
                    f"cannot say how many rows the parts of the batch have ({list(rows.values())}), so means over rows "
                    "cannot be put together: return a pair (total, weight) from loss, or use reduction='sum'"
                )
            scaled = {replica: value * (counts[replica] / whole) for replica, value in values.items()}
    total = torch.stack([sent(share.detach(), device) for share in scaled.values()]).sum()
    return scaled, total


def _pair(value: Any) -> tuple[torch.Tensor, torch.Tensor | float] | None:
    if not (isinstance(value, tuple) and len(value) == 2):
        return None
    total, weight = value
    _check(total)
    if isinstance(weight, torch.Tensor):
        if weight.dim() > 0:
            raise ReplicaError(
                f"the weight of a loss must be a number or 0-dim, got shape {tuple(weight.shape)}"
            )
        weight = weight.detach()
    return total, weight


def _sum(weights: Sequence[torch.Tensor | float], device: torch.device) -> torch.Tensor | float:
    total: torch.Tensor | float = 0.0
    for weight in weights:
        total = total + (sent(weight, device) if isinstance(weight, torch.Tensor) else weight)
    return total


def _check(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.dim() > 0:
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ReplicaError(
            "loss must return a 0-dim tensor (a mean over the rows of its part, or a sum with "
            f"reduction='sum') or a pair (total, weight), got {got}"
        )


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
        forward: Forward | None,
        loss: Loss,
        reduction: Reduction,
        scaler: GradScaler | None,
        outputs: bool,
    ) -> tuple[torch.Tensor, tuple[Any, ...] | None]:
        """Forward, losses and backward of all replicas; the whole loss, and the outputs if asked for."""

        def call(replica: int) -> Any:
            part = self._fetched(feed, replica)
            made = self._each[replica](part) if forward is None else forward(self._each[replica], part)
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
        return self._runner.run({r: partial(job, r) for r in range(len(feed.fetch))}, serial), serial


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
