"""``ReplicaExecutor``: one model on several devices of one process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module

from pipegraph.closing import Closing
from pipegraph.device.backend import Slot, normalised, slots_on
from pipegraph.device.opening import every_device
from pipegraph.errors import ReplicaError
from pipegraph.integers import flag
from pipegraph.replicas.buckets import deal_owners
from pipegraph.replicas.build import Replicas, refuse_held_gradients
from pipegraph.replicas.calls import (
    Calls,
    Forward,
    Loss,
    StepResult as StepResult,
    by_signature,
    own_keys,
    plain_keys,
    unwrapped,
)
from pipegraph.replicas.feed import batch_feed, call_feed
from pipegraph.replicas.group import Ranks, refuse_own_collectives
from pipegraph.replicas.losses import Reduction
from pipegraph.replicas.optimizers import Factory, OneOptimizer, ReplicaOptimizers
from pipegraph.replicas.proxy import JointOptimizer
from pipegraph.replicas.reducer import Reducer
from pipegraph.replicas.replica_threads import Abandoned, ReplicaThreads, note_once
from pipegraph.replicas.runner import ReplicaRunner, warn_if_unequal
from pipegraph.replicas.scatter import gather
from pipegraph.replicas.update import Exchange, Update
from pipegraph.replicas.usage import Usage


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
        optimizer: a function that makes one or more optimizers from a replica's parameters, or from the
            replica itself if its parameter is named ``module``. Without it, call the executor like a module and
            train ``model`` yourself.
        shard_optimizer: whether each replica keeps the optimizer state only of its share of the parameters.
            Not for optimizers whose step of one parameter depends on other parameters.
        compile: arguments for ``torch.compile``, applied to every replica in bucket-sized graphs.
        deterministic: run the replicas one after another, each seeded by (seed, call, replica).
        process_group: gradients are averaged over its ranks; by default over the default group, if one is
            initialised.

    Raises:
        ReplicaError: the model cannot be replicated; the message says what and why.
        DeviceError: this machine lacks a device.
    """

    def __init__(
        self,
        model: Module,
        devices: Sequence[torch.device | str | int | Slot] | None = None,
        output_device: torch.device | str | int | None = None,
        dim: int = 0,
        optimizer: Factory | None = None,
        shard_optimizer: bool = False,
        compile: Mapping[str, Any] | None = None,
        deterministic: bool = False,
        process_group: Any = None,
    ) -> None:
        shard_optimizer = flag(shard_optimizer, "ReplicaExecutor: shard_optimizer", ReplicaError)
        deterministic = flag(deterministic, "ReplicaExecutor: deterministic", ReplicaError)
        slots = slots_on(every_device() if devices is None else devices)
        if not slots:
            raise ReplicaError("devices is empty: name at least one, such as ['cpu']")
        if shard_optimizer and optimizer is None:
            raise ReplicaError("shard_optimizer=True shards the state of optimizer=..., which is missing")
        self.module = model
        self.output_device = slots[0].device if output_device is None else normalised(output_device)
        self._dim = dim
        self._usage = Usage()
        inner, wrap = unwrapped(model)
        self._ranks = Ranks.current(slots[0].device, process_group)
        if self._ranks is not None:
            if len(slots) > 1:
                refuse_own_collectives(inner)
            self._ranks.take_first_ranks([*inner.parameters(), *inner.buffers()])
        if optimizer is not None:
            refuse_held_gradients(inner)
        self._replicas = Replicas(inner, slots)
        count = len(slots)
        owners = None
        if shard_optimizer and count > 1:
            owners = deal_owners([parameter.nbytes for parameter in inner.parameters()], count)
        self._optimizers = (
            None if optimizer is None else ReplicaOptimizers(optimizer, self._replicas.modules, owners)
        )
        self._runner = ReplicaRunner(slots)
        self._reducer: Reducer | None = None
        try:
            warn_if_unequal(list(self._runner.backends))
            self._wire(owners)
            self._calls = Calls(
                self._runner, model, self._replicas, wrap, compile, deterministic, self._exchange
            )
        except BaseException:
            if self._reducer is not None:
                self._reducer.stop()
                self._reducer.join()
            self._runner.close()
            raise
        self._note_readers(attributes=True)
        self._end = weakref.finalize(self, _end, self._reducer, self._runner.threads, self._usage)

    def _wire(self, owners: list[int] | None) -> None:
        """The parts that stand between the replicas."""
        parameters, slots, backends = self._replicas.parameters, self._runner.slots, self._runner.backends
        if len(slots) > 1 or self._ranks is not None:
            names, sparse = self._replicas.names, self._replicas.sparse()
            self._reducer = Reducer(
                parameters, names, slots, backends, owners, self._ranks, sparse, self._usage
            )
        optimizers = self._optimizers
        stepped = () if optimizers is None else optimizers.indices
        self._exchange = Exchange(parameters, owners, stepped, slots, backends)
        self._update = None
        self._proxies: tuple[JointOptimizer, ...] = ()
        if optimizers is not None:
            end = weakref.WeakMethod(self.break_off)
            self._update = Update(
                end, self._runner, self._replicas, optimizers, self._exchange, self._reducer
            )
            self._proxies = tuple(JointOptimizer(part, self) for part in optimizers.parts)

    # Calling it like a module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Scatter, run the replicas at the same time, gather on ``output_device``.

        The outputs are differentiable. After your own backward, ``executor.module`` holds in ``.grad``
        the plain sum over the replicas. Without ``optimizer=`` the parameters are copied from the first
        replica at every call.

        Raises:
            The first failing replica's exception, with its own type and a note that names it.
        """
        with self._usage.entered(), self.call():
            feed = call_feed(args, kwargs, self._runner.slots, self._dim)
            self._align()
            followed = self._reducer if self._usage.syncing and torch.is_grad_enabled() else None
            if followed is not None:
                followed.prepare()
            elif self._reducer is not None and torch.is_grad_enabled():
                self._reducer.watch_accumulation()
            outputs = self._calls.outputs(feed)
            if len(self._runner.slots) == 1:
                joined = outputs[0]
            else:
                joined = gather(list(outputs.values()), self.output_device, self._dim)
            if followed is not None:
                followed.follow(outputs, joined)
            return joined

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
            forward: ``forward(module, part)``; by default ``module(part)``, or ``module(**part)`` where the
                part is a mapping whose keys the module's ``forward`` takes.
            reduction: what a plain loss is.
            clip_norm: scale the reduced gradients to at most this total norm.
            scaler: a ``GradScaler``; this step scales, unscales, checks and updates it.
            outputs: keep the replicas' outputs in the result.

        Raises:
            Exception: that of the first failing replica, with its own type and a note that names it. Before the
                first optimizer step has begun the executor stays usable, with all gradients dropped; a later
                failure closes it.
        """
        if self._optimizers is None and self._usage.syncing:
            raise ReplicaError("step() needs optimizer=... at construction, or no_sync()")
        if clip_norm is not None and not clip_norm > 0:
            raise ReplicaError(f"clip_norm must be > 0, got {clip_norm}")
        with self._usage.entered(), self.call():
            return self._step(batch, loss, forward or by_signature, reduction, clip_norm, scaler, outputs)

    # Apart, because a `try` inside the `with` has a line at which Ctrl-C would leave the lock taken.
    def _step(
        self,
        batch: Any,
        loss: Loss,
        forward: Forward,
        reduction: Reduction,
        clip_norm: float | None,
        scaler: GradScaler | None,
        outputs: bool,
    ) -> StepResult:
        feed = batch_feed(batch, self._runner.slots, self._dim)
        del batch
        self._align()
        for part in () if self._optimizers is None else self._optimizers.parts:
            part.align()
        reducer = self._reducer if self._usage.syncing else None
        self._replicas.spoilt = True
        try:
            if reducer is not None:
                reducer.begin(list(range(len(feed.fetch))))
            elif self._reducer is not None:
                self._reducer.watch_accumulation()
            total, kept = self._calls.backward(feed, forward, loss, reduction, scaler, outputs, self._reducer)
            del feed
            if reducer is not None:
                reducer.complete()
                reducer.give()
        except BaseException as failure:
            self._forget(reducer, failure)
            raise
        if not self._usage.syncing or self._update is None:
            self._replicas.spoilt = False
            return StepResult(total, kept, None, stepped=False)
        norm, stepped = self._update.make(clip_norm, scaler)
        for proxy in self._proxies:
            proxy._opt_called = True  # what schedulers ask, to warn of a step before the optimizer's
        self._replicas.drop_gradients()
        if reducer is not None:
            reducer.release()
        return StepResult(total, kept, norm, stepped)

    def _step_outside(self, part: OneOptimizer) -> None:
        """The user's own ``executor.optimizer.step()``."""
        assert self._update is not None
        with self._usage.entered(), self.call():
            self._update.step_outside(part)

    def _align(self) -> None:
        """Before a call: flags, buffers and, where nobody else keeps them equal, parameters."""
        replicas = self._replicas
        replicas.check_tree()
        if self._ranks is not None and replicas.modules[0].training and self._usage.syncing:
            self._ranks.take_first_ranks(list(replicas.modules[0].buffers()))
        written = (
            len(replicas.modules) > 1 and replicas.copy_buffers()
        )  # before attributes, which may hold them too
        followed = replicas.attributes.follow()
        if written or followed:
            self._note_readers(followed)
        replicas.copy_flags()
        # With an optimizer, the replicas' own steps keep them equal; without, nobody else does.
        if len(replicas.modules) > 1 and (self._optimizers is None or replicas.parameters_written()):
            self._exchange.settle()
            replicas.copy_parameters()

    def _forget(self, reducer: Reducer | None, failure: BaseException) -> None:
        """After a failure before the optimizers: usable, unless something may still run on."""
        if isinstance(failure, Abandoned):
            self.break_off("interrupted twice while replicas still ran", join=False)
        elif reducer is not None and not reducer.abort():
            note_once(
                failure, "the executor is closed: the other ranks wait for the rest of this step's buckets"
            )
            self.break_off("a step failed after its first collective", join=False)
        else:
            self._replicas.drop_gradients()

    # State

    @property
    def optimizer(self) -> JointOptimizer:
        """The replicas' optimizers as one: schedulers attach to it, and what is done to it is done to all.

        Raises:
            ReplicaError: the executor was built without ``optimizer=``, or with one that gave several.
        """
        if len(self.optimizers) != 1:
            raise ReplicaError(
                f"optimizer= made {len(self.optimizers)} optimizers: use executor.optimizers"
                if self.optimizers
                else "the executor was built without optimizer=..."
            )
        return self.optimizers[0]

    @property
    def optimizers(self) -> tuple[JointOptimizer, ...]:
        """One for each that ``optimizer=`` returned."""
        return self._proxies

    def state_dict(self) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ...}`` as of one model and one optimizer; keys without prefix."""
        self._exchange.settle()
        state: dict[str, Any] = {"model": plain_keys(self.module.state_dict())}
        if self._optimizers is not None:
            state["optimizer"] = self._optimizers.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, here or on any other number of replicas.

        A state of another model is refused by torch, which may have loaded what fits: then on all replicas.

        Raises:
            StateError: the optimizer's groups do not fit; nothing was loaded.
        """
        with self._usage.entered(), self.call():
            self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        self._exchange.settle()
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
            except BaseException:
                self.break_off("a failed load_state_dict left the optimizers different")
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
        with self._usage.entered(), self.call():
            self._copy_all()

    def _copy_all(self) -> None:
        self._exchange.settle()
        if len(self._runner.slots) > 1:
            self._replicas.copy_parameters()
            self._replicas.copy_buffers(everything=True)
            self._replicas.attributes.follow(everything=True)
            self._note_readers(attributes=True)

    def _note_readers(self, attributes: bool) -> None:
        """Replicas with a stream of their own read the buffers, and attributes, that the caller's stream has copied."""
        for replica in range(len(self._runner.slots)):
            if self._runner.has_stream(replica):
                for held in self._replicas.held(replica, attributes):
                    self._runner.reads(replica, held)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Calls inside only accumulate gradients: no reduction, no optimizer step. Divide the loss by k."""
        return self._usage.no_sync()

    # Life

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call, which begins from a clean state, whatever has become of the one before."""
        usage = self._usage
        usage.began()
        if self._replicas.spoilt:
            self._replicas.drop_gradients()
        if self._reducer is not None:
            self._reducer.outside.settle()
            self._reducer.outside.clear()
        if usage.torn or (self._reducer is not None and self._reducer.outside.failed):
            self._renew()
        usage.torn = True
        try:
            yield
        except (
            Exception
        ):  # its cause is cleared away already; not so an interrupt, which may come at any line
            self._replicas.attributes.note()
            usage.torn = False
            raise
        self._replicas.attributes.note()
        usage.torn = False

    def _renew(self) -> None:
        """A call was interrupted, or a backward of the user's has failed: begin anew."""
        if self._runner.threads is not None:
            self._runner.threads.settle()
        if self._ranks is None:
            if self._reducer is not None:
                self._reducer.renew()
        elif self._usage.torn or (self._reducer is not None and not self._reducer.forget()):
            self.break_off(
                "it was interrupted in a call, whose collectives the other ranks wait for", join=False
            )
            self._usage.refuse_closed()

    def break_off(self, why: str, join: bool = True) -> None:
        """Replicas may differ from now on, or may run on: close."""
        self._usage.closed = why
        self._shut(join)

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
                self._exchange.settle()
                self._usage.closed = "close() was called"
            self._shut(join=True)

    def _shut(self, join: bool) -> None:
        self._end()
        if self._reducer is not None and join:
            self._reducer.join()
        self._runner.close(join)

    def __getattr__(self, name: str) -> Any:
        of_model = hasattr(vars(self).get("module", Module), name)
        where = f": it is the model's, executor.module.{name}" if of_model else ""
        raise AttributeError(f"ReplicaExecutor has no attribute {name!r}{where}")

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
        threads.close(join=False)
