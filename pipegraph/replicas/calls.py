"""Runs forward, loss and backward on all replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module

from pipegraph.device.split import map_tree
from pipegraph.replicas.build import Replicas
from pipegraph.replicas.caller import no_autocast
from pipegraph.replicas.compiled import compiled, warn_of_no_overlap
from pipegraph.replicas.feed import ReplicaFeed
from pipegraph.replicas.jobs import Forward, Loss, after, backward_job, call_job, step_job
from pipegraph.replicas.losses import Reduction, shares
from pipegraph.replicas.parameter_gather import Exchange
from pipegraph.replicas.replica_threads import Job
from pipegraph.replicas.runner import ReplicaRunner
from pipegraph.replicas.seeds import forked_seed, replica_seed


class Calls:
    """What is called of each replica, and how: at the same time, or in turn and seeded.

    Args:
        runner: runs the jobs.
        module: the first replica as the user holds it.
        replicas: all of them.
        wrap: how the user had wrapped (compiled) the model, if so.
        options: for ``torch.compile``; None without it.
        deterministic: run the replicas one after another, each seeded by (seed, call, replica).
        exchange: gathers new parameters, which a forward has to wait for.

    Attributes:
        count: calls so far.
        joint_backward: one autograd call for all replicas, as the threads of one GPU's slots would make it.
    """

    def __init__(
        self,
        runner: ReplicaRunner,
        module: Module,
        replicas: Replicas,
        wrap: Callable[[Module], Callable[..., Any]] | None,
        options: Mapping[str, Any] | None,
        deterministic: bool,
        exchange: Exchange | None,
    ) -> None:
        self._runner = runner
        self._module = module
        self._each = _callables(module, replicas.modules, wrap, options)
        self._seen_shapes: set[object] | None = set() if options is not None or wrap is not None else None
        self._deterministic = deterministic
        self._exchange = exchange
        self._seed = torch.initial_seed()
        self.count = 0
        self.joint_backward = False
        runner.seed_devices(self._seed)
        if deterministic:
            runner.stop_watching()

    def outputs(self, feed: ReplicaFeed) -> dict[int, Any]:
        """Call each replica with its arguments."""
        jobs = {r: call_job(self._each[r], fetch) for r, fetch in enumerate(feed.fetch)}
        return self._forward(jobs, feed)[0]

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
        jobs = {r: step_job(self._each[r], fetch, forward, loss) for r, fetch in enumerate(feed.fetch)}
        made, serial = self._forward(jobs, feed)
        values = {r: value for r, (_, value) in made.items()}
        scaled, total = shares(values, dict(enumerate(feed.rows)), reduction, self._runner.slots[0].device)
        kept = tuple(map_tree(_detached, given) for given, _ in made.values()) if outputs else None
        del made, values
        if scaler is not None:
            scaled = {r: scaler.scale(share) for r, share in scaled.items()}
        with no_autocast():
            if self.joint_backward:
                torch.autograd.backward(list(scaled.values()))
            else:
                self._runner.run({r: backward_job(share) for r, share in scaled.items()}, serial)
        return total, kept

    def _forward(self, jobs: dict[int, Job], feed: ReplicaFeed) -> tuple[dict[int, Any], bool]:
        """Run forwards; also whether this call's replicas go one after another."""
        serial = self._deterministic
        if self._deterministic:
            devices = list(self._runner.backends)
            jobs = {
                r: forked_seed(job, replica_seed(self._seed, self.count, r), devices)
                for r, job in jobs.items()
            }
        if self._seen_shapes is not None:
            # A compiler's first run for a shape is not made by several threads at once.
            shapes = (feed.shapes(), self._module.training, torch.is_grad_enabled())
            serial = serial or shapes not in self._seen_shapes
            self._seen_shapes.add(shapes)
        self.count += 1
        if self._exchange is not None:
            jobs = {r: after(self._exchange, r, job) for r, job in jobs.items()}
        return self._runner.run_watched(jobs, serial), serial


def _callables(
    module: Module,
    modules: list[Module],
    wrap: Callable[[Module], Callable[..., Any]] | None,
    options: Mapping[str, Any] | None,
) -> list[Callable[..., Any]]:
    if options is not None:
        return [compiled(each, options) for each in modules]
    if wrap is None:
        return list(modules)
    if len(modules) > 1:
        warn_of_no_overlap("the model was compiled whole before")
    return [module, *(wrap(each) for each in modules[1:])]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
