"""The second half of a step: unscale, one check for infinities, clip, step, drop the gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.amp.grad_scaler import GradScaler

from pipegraph.replicas.build import Replicas
from pipegraph.replicas.caller import no_autocast
from pipegraph.replicas.optimizers import OneOptimizer, ReplicaOptimizers
from pipegraph.replicas.parameter_gather import Exchange
from pipegraph.replicas.reducer import Reducer
from pipegraph.replicas.replica_threads import Abandoned, note_once
from pipegraph.replicas.runner import ReplicaRunner

DIFFER = "the executor is closed: its replicas may differ after a failed optimizer step"


class Update:
    """Makes optimizer steps on all replicas.

    Args:
        break_off: closes the executor, whose replicas may differ.
        reducer: None with one replica.
    """

    def __init__(
        self,
        break_off: weakref.WeakMethod[Callable[..., None]],
        runner: ReplicaRunner,
        replicas: Replicas,
        optimizers: ReplicaOptimizers,
        exchange: Exchange,
        reducer: Reducer | None,
    ) -> None:
        self._break_off = break_off
        self._runner = runner
        self._replicas = replicas
        self._optimizers = optimizers
        self._exchange = exchange
        self._reducer = reducer
        self._stepped: dict[int, bool] = {}  # by replica that has begun its step whether it has made it

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
        return norm, finite

    def step_outside(self, part: OneOptimizer) -> None:
        """``executor.optimizer.step()``: the gradients that the replicas hold are summed first, and stay."""
        self._stepped = {}
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
            if (break_off := self._break_off()) is not None:
                break_off("an optimizer step failed half-way", not isinstance(failure, Abandoned))

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
        self._exchange.start()
        self._exchange.wait(0)
        for part in parts:
            part.settings_from_step()
        self._replicas.note_parameters()
