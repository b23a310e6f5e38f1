"""``ReplicaExecutor``: one model on several devices of one process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from pipegraph import concurrency
from pipegraph.device.accelerator import every_device
from pipegraph.device.backend import Slot, normalised, slots_on
from pipegraph.errors import ReplicaError
from pipegraph.integers import flag
from pipegraph.replicas.build import Replicas, refuse_held_gradients
from pipegraph.replicas.calls import (
    Calls,
    Forward,
    Loss,
    Reduction,
    StepResult as StepResult,
    own_keys,
    plain_keys,
    unwrapped,
)
from pipegraph.replicas.optimizers import Factory, ReplicaOptimizers
from pipegraph.replicas.reducer import Reducer
from pipegraph.replicas.replica_threads import ReplicaThreads, no_autocast, note_once
from pipegraph.replicas.runner import ReplicaRunner
from pipegraph.replicas.scatter import batch_feed, call_feed, gather
from pipegraph.stopping import Closing

T = TypeVar("T")

_IN_USE = "the executor is in use: one call at a time, and none from inside a forward or loss"


class Usage:
    """One caller at a time, in the process that built the executor, until it is closed.

    Calls are ``with`` statements on a plain lock: Ctrl-C cannot come between taking it and the promise to give it
    back, as it can in a context manager written in Python.

    Attributes:
        closed: why nothing may be called any more.
    """

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._caller: int | None = None
        self._process = os.getpid()
        self.closed: str | None = None

    @property
    def here(self) -> bool:
        """Whether this is the process that built the executor, and has its threads."""
        return os.getpid() == self._process

    def entered(self) -> AbstractContextManager[Any]:
        """To be held during a call, which :meth:`begin` then begins.

        Raises:
            ReplicaError: closed, in use, or in a forked child.
        """
        if not self.here:
            raise ReplicaError(
                "the executor belongs to another process: a forked child has none of its threads; build one there"
            )
        self._refuse_closed()
        if self._lock.locked():
            raise ReplicaError(_IN_USE)
        return self._lock

    def begin(self) -> None:
        """This thread holds the lock for a call; raises ReplicaError if the executor was closed meanwhile."""
        self._caller = concurrency.get_ident()
        self._refuse_closed()

    def _refuse_closed(self) -> None:
        if self.closed is not None:
            raise ReplicaError(f"the executor is closed: {self.closed}")

    def closing(self, members: Iterable[concurrency.Thread]) -> AbstractContextManager[Any]:
        """To be held while closing: waits for the call that runs in another thread.

        Raises:
            ReplicaError: this thread makes that call, or works for it: it would wait for itself.
        """
        mine = self._caller == concurrency.get_ident() or concurrency.current_thread() in members
        if self._lock.locked() and mine:
            raise ReplicaError(_IN_USE)
        return self._lock


class ReplicaExecutor(Closing):
    """A model on several device slots of this process, trained as if on one device.

    Replicas are kept between steps and always have equal parameters. Gradients are summed in buckets while
    backward runs, and each replica computes the loss of its own outputs. Results equal those of one device
    for losses that are sums or means over rows. Losses that couple rows (contrastive ones) and batch norm in
    training see only the rows of their replica, as in DataParallel.

    Args:
        model: on the first device; it *is* the first replica. Do not replace its parameters afterwards.
        devices: one entry per replica; a device may be named several times. By default all GPUs, or the CPU
            where there is none.
        output_device: where ``executor(...)`` gathers; the first device by default.
        dim: the dimension that batches are cut along.
        optimizer: a function that makes an optimizer from a replica's parameters, or from the replica itself if its
            parameter is named ``module``. Without it, call the executor like a module and train ``model`` yourself.
        deterministic: run the replicas one after another, each seeded by (seed, call, replica).

    Raises:
        ReplicaError: the model cannot be replicated; the message says what and why. Or several devices in one process
            of an initialised process group.
        DeviceError: this machine lacks a device.
    """

    def __init__(
        self,
        model: Module,
        devices: Sequence[torch.device | str | int | Slot] | None = None,
        output_device: torch.device | str | int | None = None,
        dim: int = 0,
        optimizer: Factory | None = None,
        deterministic: bool = False,
    ) -> None:
        deterministic = flag(deterministic, "ReplicaExecutor: deterministic", ReplicaError)
        slots = slots_on(every_device() if devices is None else devices)
        if not slots:
            raise ReplicaError("devices is empty: name at least one, such as ['cpu']")
        if len(slots) > 1 and dist.is_available() and dist.is_initialized():
            raise ReplicaError(
                "an executor with several devices does not work inside a process group: use "
                "torch.nn.parallel.DistributedDataParallel with one device per process, and take its batches from the "
                "loader"
            )
        self.module = model
        self._output_device = slots[0].device if output_device is None else normalised(output_device)
        self._dim = dim
        self._usage = Usage()
        # Held in `no_sync`. A lock, because Ctrl-C cannot come between taking it and the promise to give it back.
        self._accumulating = concurrency.Lock()
        inner, wrap = unwrapped(model)
        self._optimizers: ReplicaOptimizers | None = None
        if optimizer is None:
            self._replicas = Replicas(inner, slots[:1])  # nobody steps others
        else:
            refuse_held_gradients(inner)
            self._replicas = Replicas(inner, slots)
            self._optimizers = ReplicaOptimizers(optimizer, self._replicas.modules)
        self._runner = ReplicaRunner(slots)
        self._reducer: Reducer | None = None
        try:
            if len(self._replicas.modules) > 1:
                replicas = self._replicas
                self._reducer = Reducer(
                    replicas.parameters, replicas.names, slots, self._runner.backends, replicas.sparse()
                )
            self._calls = Calls(self._runner, model, self._replicas, wrap, deterministic)
        except BaseException:
            if self._reducer is not None:
                self._reducer.stop()
                self._reducer.join()
            self._runner.close()
            raise
        self._note_readers()
        self._end = weakref.finalize(self, _end, self._reducer, self._runner.threads, self._usage)

    # Calling it like a module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Scatter, replicate, run the replicas at the same time, gather on ``output_device``: as DataParallel.

        All of it is differentiable: after your own backward, ``executor.module`` holds in ``.grad`` the sum over
        the replicas.

        Raises:
            The first failing replica's exception, with its own type and a note that names it.
        """
        with self._usage.entered(), self._call():
            outputs = self._calls.outputs(call_feed(args, kwargs, self._runner.slots, self._dim))
            if len(self._runner.slots) == 1:
                return outputs[0]
            return gather(list(outputs.values()), self._output_device, self._dim)

    # A training step

    def step(
        self,
        batch: Any,
        loss: Loss,
        forward: Forward | None = None,
        reduction: Reduction = "mean",
        clip_norm: float | None = None,
        scaler: GradScaler | None = None,
        outputs: bool = False,
    ) -> StepResult:
        """Forward, loss and backward on every replica, gradients reduced meanwhile, then one optimizer step.

        Afterwards all gradients are None. In :meth:`no_sync` a step only accumulates.

        Args:
            batch: plain (host or device), cut here; or already scattered by ``ops.Scatter``.
            loss: ``loss(outputs, part)``: a mean over the part's rows, a sum with ``reduction="sum"``,
                or a pair ``(total, weight)`` where rows weigh differently.
            forward: ``forward(module, part)``; by default ``module(part)``.
            reduction: what a plain loss is.
            clip_norm: scale the reduced gradients to at most this total norm.
            scaler: a ``GradScaler``; this step scales, unscales, checks and updates it.
            outputs: keep the replicas' outputs in the result.

        Raises:
            Exception: that of the first failing replica, with its own type and a note that names it. Before the
                first optimizer step has begun the executor stays usable, with all gradients dropped; a later
                failure closes it, and so does a KeyboardInterrupt.
        """
        optimizers = self._optimizers
        if optimizers is None:
            raise ReplicaError("step() needs optimizer=... at construction")
        if clip_norm is not None and not clip_norm > 0:
            raise ReplicaError(f"clip_norm must be > 0, got {clip_norm}")
        with self._usage.entered(), self._call():
            self._align()
            optimizers.align()
            feed = batch_feed(batch, self._runner.slots, self._dim)
            syncing = not self._accumulating.locked()
            backward = partial(self._calls.backward, feed, forward, loss, reduction, scaler, outputs)
            total, kept = self._gradients(syncing, len(feed.fetch), backward)
            del feed, backward
            if not syncing:
                return StepResult(total, kept)
            norm = self._optimize(optimizers, clip_norm, scaler)
            self._replicas.drop_gradients()
            if self._reducer is not None:
                self._reducer.release()
            return StepResult(total, kept, norm)

    # Apart from `step`, because a `try` inside its `with` has a line at which Ctrl-C would leave the lock taken.
    def _gradients(self, syncing: bool, count: int, backward: Callable[[], T]) -> T:
        """Make the replicas' gradients, and reduce them meanwhile."""
        reducer = self._reducer
        try:
            if reducer is not None and syncing:
                reducer.begin(range(count))
            elif reducer is not None:
                reducer.prepare()
            made = backward()
            if reducer is not None and syncing:
                reducer.complete()
        except Exception:
            if reducer is not None:
                reducer.abort()
            self._replicas.drop_gradients()
            raise
        return made

    def _optimize(
        self, optimizers: ReplicaOptimizers, clip_norm: float | None, scaler: GradScaler | None
    ) -> torch.Tensor | None:
        """Unscale, check, clip, step; returns the norm before clipping."""
        steps = {replica: each.step for replica, each in enumerate(optimizers.each)}
        stepping = False
        try:
            finite = scaler is None or optimizers.unscale(scaler)
            norm = optimizers.clip(clip_norm) if clip_norm is not None else None
            if finite:
                stepping = True
                with no_autocast():
                    self._runner.run(steps)
                self._replicas.note_parameters()
            if scaler is not None:
                scaler.update()
        except Exception as failure:
            if scaler is not None:
                optimizers.forget_scaling(scaler)
            self._replicas.drop_gradients()
            if stepping:
                note_once(
                    failure, "the executor is closed: its replicas may differ after a failed optimizer step"
                )
                self._break_off("an optimizer step failed half-way")
            raise
        return norm

    def _align(self) -> None:
        """Before a step: flags and buffers as the first replica has them."""
        replicas = self._replicas
        replicas.check_tree()
        replicas.refuse_written()
        if replicas.copy_buffers():
            self._note_readers(attributes=False)
        replicas.copy_flags()

    # State

    @property
    def optimizer(self) -> Optimizer:
        """The first replica's own, to which schedulers attach: before each step the others get its settings.

        Raises:
            ReplicaError: the executor was built without ``optimizer=``.
        """
        if self._optimizers is None:
            raise ReplicaError("the executor was built without optimizer=...")
        return self._optimizers.each[0]

    def state_dict(self) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ...}`` as of one model and one optimizer; keys without prefix."""
        state: dict[str, Any] = {"model": plain_keys(self.module.state_dict())}
        if self._optimizers is not None:
            state["optimizer"] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, here or on any other number of replicas.

        A state of another model is refused by torch, which may have loaded what fits: then on all replicas.

        Raises:
            StateError: the optimizer's groups do not fit; nothing was loaded.
        """
        with self._usage.entered(), self._call():
            self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        optimizers = self._optimizers if "optimizer" in state else None
        if optimizers is not None:
            optimizers.check(state["optimizer"])
        try:
            module = self._replicas.modules[0]
            module.load_state_dict(own_keys(state["model"], module))
        finally:
            # What was refused may have been loaded in part, as with torch: the replicas stay alike.
            self._copy_all()
        if optimizers is not None:
            try:
                optimizers.load_state_dict(state["optimizer"])
            except Exception:
                self._break_off("a failed load_state_dict left the optimizers different")
                raise

    def train(self, mode: bool = True) -> Self:
        """Training mode for all replicas (the others follow at the next call)."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Evaluation mode for all replicas."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Drop all gradients of all replicas, accumulated ones included."""
        self._replicas.drop_gradients()

    def sync(self) -> None:
        """Copy parameters, buffers and attributes of the first replica, written from outside, to the others."""
        with self._usage.entered(), self._call():
            self._copy_all()

    def _copy_all(self) -> None:
        self._replicas.check_tree()
        self._replicas.copy_all()
        self._note_readers()

    def _note_readers(self, attributes: bool = True) -> None:
        """Replicas with a stream of their own read the buffers, and attributes, that the caller's stream has copied."""
        for replica in range(1, len(self._replicas.modules)):
            for held in self._replicas.held(replica, attributes):
                self._runner.reads(replica, held)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Calls inside only accumulate gradients: no reduction, no optimizer step. Divide the loss by k."""
        return nullcontext() if self._accumulating.locked() else self._accumulating

    # Life

    @contextmanager
    def _call(self) -> Iterator[None]:
        """A call of this thread. An interrupt may leave any of its work half done, so it closes the executor."""
        self._usage.begin()
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._break_off("a call was interrupted; build another, and load its state_dict()")
            self._replicas.drop_gradients()
            raise

    def _break_off(self, why: str) -> None:
        """Replicas may differ from now on: close, once all that still runs has ended."""
        self._usage.closed = why
        self._shut()

    def close(self) -> None:
        """End threads and streams, take the hooks off the model, which stays usable. May be called twice.

        A call that runs in another thread is waited for.

        Raises:
            ReplicaError: called from inside a forward or loss, or by a signal handler during a call.
        """
        if not self._usage.here:  # a forked child has none of the threads
            return
        members = () if self._runner.threads is None else self._runner.threads.members
        with self._usage.closing(members):
            if self._usage.closed is None:
                self._usage.closed = "close() was called"
            self._shut()

    def _shut(self) -> None:
        self._end()
        if self._reducer is not None:
            self._reducer.join()
        self._runner.close()

    def __repr__(self) -> str:
        state = "closed" if self._usage.closed is not None else "ready"
        places = ", ".join(map(str, self._runner.slots))
        return (
            f"<ReplicaExecutor {type(self.module).__name__} on {places}: {state}, {self._calls.count} calls>"
        )


def _end(reducer: Reducer | None, threads: ReplicaThreads | None, usage: Usage) -> None:
    """Ends the threads of an executor that was not closed; waits for nothing."""
    if not usage.here:
        return  # the parent's threads, and locks that they may have held
    if reducer is not None:
        reducer.stop()
    if threads is not None:
        threads.end()
