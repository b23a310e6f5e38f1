"""The second half of a step: unscale, one check for infinities, clip, step, copy what only its owner has stepped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import Parameter

from pipegraph.device.backend import Backend, Slot
from pipegraph.replicas.build import Replicas
from pipegraph.replicas.optimizers import OneOptimizer, ReplicaOptimizers
from pipegraph.replicas.reducer import Reducer
from pipegraph.replicas.replica_threads import Abandoned, no_autocast, note_once
from pipegraph.replicas.runner import ReplicaRunner

DIFFER = "the executor is closed: its replicas may differ after a failed optimizer step"


class Exchange:
    """Copies of stepped parameters, on one side stream per replica.

    Between :meth:`start` and a replica's :meth:`wait` that replica's parameters are not to be used.

    Args:
        parameters: per replica.
        owners: by parameter; None where every replica steps all: nothing is copied then, or waited for.
        indices: of the parameters that an optimizer steps.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Parameter]],
        owners: Sequence[int] | None,
        indices: Iterable[int],
        slots: Sequence[Slot],
        backends: Mapping[torch.device, Backend],
    ) -> None:
        self._parameters = parameters
        self._owners = owners or []
        self._indices = sorted(indices)
        self._backends = [backends[slot.device] for slot in slots]
        self._streams = [
            backend.stream(slot, f"gather-{number}")
            for number, (slot, backend) in enumerate(zip(slots, self._backends, strict=True))
        ]
        self._arrived = [backend.event() for backend in self._backends]
        self._read = [backend.event() for backend in self._backends]
        self._stepped: list[int] = []

    def start(self) -> None:
        """After all owners' steps, as the current streams see them. Returns at once."""
        if not self._owners:
            return
        # Frozen ones are not stepped.
        self._stepped = [i for i in self._indices if self._parameters[0][i].requires_grad]
        stepped = [backend.current_stream().record_event() for backend in self._backends]
        for replica, stream in enumerate(self._streams):
            for event in stepped:
                stream.wait_event(event)
            stream.run(lambda replica=replica: self._receive(replica))  # type: ignore[misc]
            stream.record_event(self._arrived[replica])
        # A copy between devices is made by its owner's stream too, also after the owner has all it receives.
        for stream, event in zip(self._streams, self._read, strict=True):
            stream.record_event(event)

    def _receive(self, replica: int) -> None:
        remote = [index for index in self._stepped if self._owners[index] != replica]
        mine = [self._parameters[replica][index] for index in remote]
        theirs = [self._parameters[self._owners[index]][index] for index in remote]
        with ExitStack() as stack:
            # A copy between devices is ordered on the current streams of both; the receiver's comes last.
            for owner in [*set(self._owners) - {replica}, replica]:
                stack.enter_context(self._backends[owner].use(self._streams[owner]))
            stack.enter_context(torch.no_grad())
            for here, there in zip(mine, theirs, strict=True):
                here.copy_(there, non_blocking=True)

    def wait(self, replica: int) -> None:
        """Make the current stream wait for a replica's parameters. Raises what the copies raised."""
        self._arrived[replica].wait()

    def settle(self) -> None:
        """The same for all replicas; and owners may write their parameters again, which nobody copies any more."""
        for replica, event in enumerate(self._read):
            self.wait(replica)
            event.wait()


class Update:
    """Makes optimizer steps on all replicas; ``break_off`` closes the executor, whose replicas may differ."""

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
