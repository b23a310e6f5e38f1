"""The second half of a step: unscale, one check for infinities, clip, step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch.amp.grad_scaler import GradScaler

from pipegraph.replicas.build import Replicas
from pipegraph.replicas.optimizers import ReplicaOptimizers
from pipegraph.replicas.replica_threads import Abandoned, no_autocast, note_once
from pipegraph.replicas.runner import ReplicaRunner

DIFFER = "the executor is closed: its replicas may differ after a failed optimizer step"


class Update:
    """Makes optimizer steps on all replicas; ``break_off`` closes the executor, whose replicas may differ."""

    def __init__(
        self,
        break_off: weakref.WeakMethod[Callable[..., None]],
        runner: ReplicaRunner,
        replicas: Replicas,
        optimizers: ReplicaOptimizers,
    ) -> None:
        self._break_off = break_off
        self._runner = runner
        self._replicas = replicas
        self._optimizers = optimizers
        self._stepped: dict[int, bool] = {}  # by replica that has begun its step whether it has made it

    def align(self) -> None:
        """Before a step: settings as the first replica's optimizer has them."""
        self._optimizers.align()

    def make(self, clip_norm: float | None, scaler: GradScaler | None) -> torch.Tensor | None:
        """Unscale, check, clip, step. The gradients are to be dropped then. Returns the norm before clipping."""
        optimizers = self._optimizers
        self._stepped = {}
        try:
            finite = True if scaler is None else optimizers.unscale(scaler)
            norm = optimizers.clip(clip_norm) if clip_norm is not None else None
            if finite:
                self._step()
            if scaler is not None:
                scaler.update()
        except BaseException as failure:
            if scaler is not None:
                optimizers.forget_scaling(scaler)
            self._failed(failure)
            raise
        return norm

    def _step(self) -> None:
        stepped = self._stepped

        def step(replica: int) -> None:
            stepped[replica] = False
            self._optimizers.each[replica].step()
            stepped[replica] = True

        with no_autocast():
            self._runner.run({r: partial(step, r) for r in range(len(self._replicas.modules))})
        self._replicas.note_parameters()

    def _failed(self, failure: BaseException) -> None:
        """The replicas are alike where none has begun its step, or all have made it: else the executor is closed."""
        if not self._stepped:
            self._replicas.drop_gradients()
        elif len(self._stepped) == len(self._replicas.modules) and all(self._stepped.values()):
            self._replicas.note_parameters()
        else:
            note_once(failure, DIFFER)
            if (break_off := self._break_off()) is not None:
                break_off("an optimizer step failed half-way", not isinstance(failure, Abandoned))
