"""The second half of a step: unscale, one check for infinities, clip, step, drop the gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler

from pipegraph.errors import ReplicaError
from pipegraph.replicas.build import Replicas
from pipegraph.replicas.caller import no_autocast
from pipegraph.replicas.optimizers import OneOptimizer, ReplicaOptimizers
from pipegraph.replicas.parameter_gather import Exchange
from pipegraph.replicas.proxy import JointOptimizer
from pipegraph.replicas.reducer import Reducer
from pipegraph.replicas.replica_threads import Abandoned, note_once
from pipegraph.replicas.runner import ReplicaRunner

DIFFER = "the executor is closed: its replicas may differ after a failed optimizer step"


class Owner(Protocol):
    """The executor, as its optimizers see it."""

    def entered(self) -> AbstractContextManager[Any]:
        """Held during a call, which nobody else may make meanwhile."""

    def call(self) -> AbstractContextManager[None]:
        """The call."""

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
        self._stepped: dict[int, bool] = {}  # by replica that has begun its step whether it has made it
        self.proxies = tuple(self._proxy(part) for part in optimizers.parts)

    def make(self, clip_norm: float | None, scaler: GradScaler | None) -> tuple[torch.Tensor | None, bool]:
        """Unscale, check, clip, step. The gradients are to be dropped then.

        Returns:
            The norm before clipping, and whether the optimizers have stepped.
        """
        optimizers = self._optimizers
        self._stepped = {}
        try:
            finite = True if scaler is None else optimizers.unscale(scaler)
            norm = optimizers.clip(clip_norm) if clip_norm is not None else None
            if self._exchange is not None:
                self._exchange.settle()
            if finite:
                self._step(optimizers.parts)
            if scaler is not None:
                scaler.update()
        except BaseException as failure:
            if scaler is not None:
                for part in optimizers.parts:
                    part.forget_scaling(scaler)
            self._failed(failure, optimizers.parts)
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
            with user.entered(), user.call():
                update._step_outside(part)

        return JointOptimizer(part, make_step)

    def _step_outside(self, part: OneOptimizer) -> None:
        """``executor.optimizer.step()``: the gradients that the replicas hold are summed first, and stay."""
        self._stepped = {}
        if self._exchange is not None:
            self._exchange.settle()
        part.align()
        reducer = self._reducer
        if reducer is not None:
            self._replicas.spoilt = True
            reducer.begin(())
            reducer.complete()
            reducer.give()
        try:
            self._step([part])
        except BaseException as failure:
            self._failed(failure, [part])
            raise
        if reducer is not None:
            reducer.give_first()
            reducer.release()
            self._replicas.spoilt = False

    def _failed(self, failure: BaseException, parts: Sequence[OneOptimizer]) -> None:
        """The replicas are alike where none has begun its step, or all have made it: else the executor is closed."""
        if not self._stepped:
            self._replicas.drop_gradients()
        elif len(self._stepped) == len(self._replicas.modules) and all(self._stepped.values()):
            self._conclude(parts)
        else:
            note_once(failure, DIFFER)
            user = self._user()
            if user is not None:
                user.break_off("an optimizer step failed half-way", join=not isinstance(failure, Abandoned))

    def _step(self, parts: Sequence[OneOptimizer]) -> None:
        """Step optimizers on all replicas, and begin to exchange what only the owners have."""
        stepped = self._stepped

        def step(replica: int) -> None:
            stepped[replica] = False
            for part in parts:
                part.each[replica].step()
            stepped[replica] = True

        with no_autocast():
            self._runner.run({r: partial(step, r) for r in range(len(self._replicas.modules))})
        self._conclude(parts)

    def _conclude(self, parts: Sequence[OneOptimizer]) -> None:
        if self._exchange is not None:
            self._exchange.start()
            self._exchange.wait(0)
        for part in parts:
            part.settings_from_step()
        self._replicas.note_parameters()
