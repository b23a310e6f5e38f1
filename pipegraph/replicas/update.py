"""The second half of a step: unscale, one check for infinities, clip, step, drop the gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch.amp.grad_scaler import GradScaler

from pipegraph.errors import ReplicaError
from pipegraph.replicas.build import Replicas
from pipegraph.replicas.caller import no_autocast
from pipegraph.replicas.optimizers import OneOptimizer, ReplicaOptimizers, zero_grads
from pipegraph.replicas.parameter_gather import Exchange
from pipegraph.replicas.proxy import JointOptimizer
from pipegraph.replicas.reducer import Reducer
from pipegraph.replicas.replica_threads import Abandoned, note_once
from pipegraph.replicas.runner import ReplicaRunner

DIFFER = "the executor is closed: its replicas may differ after a failed optimizer step"


class Owner(Protocol):
    """The executor, as its optimizers see it."""

    def entered(self) -> AbstractContextManager[None]:
        """A call, which nobody else may make meanwhile."""

    def break_off(self, why: str, join: bool = True) -> None:
        """Close it: its replicas may differ."""


class Update:
    """Makes optimizer steps on all replicas. It does not keep ``user``, the executor, alive.

    There is no exchange where every replica steps all parameters, and no reducer with one replica.

    Attributes:
        proxies: the optimizers as users hold them.
    """

    def __init__(
        self,
        user: Owner,
        runner: ReplicaRunner,
        replicas: Replicas,
        optimizers: ReplicaOptimizers,
        exchange: Exchange | None,
        reducer: Reducer | None,
    ) -> None:
        self._user = weakref.ref(user)
        self._runner = runner
        self._replicas = replicas
        self._optimizers = optimizers
        self._exchange = exchange
        self._reducer = reducer
        self._spent = False
        self.proxies = tuple(self._proxy(part) for part in optimizers.parts)

    def drop_spent(self) -> None:
        """Drop gradients that optimizers have stepped with: an interrupt may have come before they were dropped."""
        if self._spent:
            self.drop()

    def drop(self) -> None:
        zero_grads(self._replicas.parameters)
        self._spent = False

    def make(self, clip_norm: float | None, scaler: GradScaler | None) -> tuple[torch.Tensor | None, bool]:
        """Unscale, check, clip, step. The gradients are to be dropped then.

        Returns:
            The norm before clipping, and whether the optimizers have stepped.
        """
        optimizers = self._optimizers
        try:
            finite = True if scaler is None else optimizers.unscale(scaler)
            norm = optimizers.clip(clip_norm) if clip_norm is not None else None
            if self._exchange is not None:
                self._exchange.settle()
            self._spent = True
            if finite:
                self._step(optimizers.parts)
            if scaler is not None:
                scaler.update()
        except BaseException as failure:
            if scaler is not None:
                for part in optimizers.parts:
                    part.forget_scaling(scaler)
            if self._spent:
                self._break(failure)
            else:
                zero_grads(self._replicas.parameters)
            raise
        for proxy in self.proxies:
            proxy._opt_called = True  # what schedulers ask, to warn of a step before the optimizer's
        return norm, finite

    def _proxy(self, part: OneOptimizer) -> JointOptimizer:
        # Schedulers hold the proxy, and through it not the executor with its threads.
        me = weakref.ref(self)

        def make_step() -> None:
            update = me()
            user = None if update is None else update._user()
            if update is None or user is None:
                raise ReplicaError("the executor of this optimizer is gone")
            with user.entered():
                update._step_outside(part)

        return JointOptimizer(part, make_step)

    def _step_outside(self, part: OneOptimizer) -> None:
        """``executor.optimizer.step()``: the gradients that the replicas hold are summed first, and stay."""
        self.drop_spent()
        if self._exchange is not None:
            self._exchange.settle()
        part.align()
        reducer = self._reducer
        if reducer is not None:
            reducer.begin(())
            reducer.complete()
            reducer.give()
        try:
            self._step([part])
        except BaseException as failure:
            self._break(failure)
            raise
        if reducer is not None:
            reducer.give_first()
            reducer.release()

    def _break(self, failure: BaseException) -> None:
        note_once(failure, DIFFER)
        user = self._user()
        if user is not None:
            user.break_off("an optimizer step failed half-way", join=not isinstance(failure, Abandoned))

    def _step(self, parts: Sequence[OneOptimizer]) -> None:
        """Step optimizers on all replicas, and begin to exchange what only the owners have."""
        with no_autocast():
            self._runner.run({r: partial(_step, parts, r) for r in range(len(self._replicas.modules))})
        if self._exchange is not None:
            self._exchange.start()
            self._exchange.wait(0)
        for part in parts:
            part.settings_from_step()
        self._replicas.note_parameters()


def _step(parts: Sequence[OneOptimizer], replica: int) -> None:
    for part in parts:
        part.each[replica].step()
