"""Sums the gradients of all replicas in buckets during backward.

The contract; if the code differs, the code is wrong:

- A hook marks (parameter, replica), once per step. It copies the gradient into
  its bucket, records an event on the stream it runs on, and never waits for another replica: one
  autograd thread serves all slots of a device. Hooks know their replica by closure.
- Buckets are launched strictly in index order, by one thread of the process.
- Side streams touch buckets only, never gradients. The next write into a
  bucket waits for the events of its last remote readers.
- Sums are made in the order of the replicas, so results repeat bit by bit.
- After all backwards, what has not been launched is reduced from whatever
  ``.grad`` exists. A parameter without a gradient on any replica keeps
  ``None`` on all; otherwise a missing one counts as zero.
- A failed step leaves nothing behind: marks belong to one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from pipegraph import concurrency
from pipegraph.device.accelerator import bind_thread
from pipegraph.device.backend import Backend, Slot
from pipegraph.errors import ReplicaError
from pipegraph.replicas.reduce_streams import GradientBucket, LiveBucket, ReduceStreams, plan_buckets
from pipegraph.replicas.replica_threads import start_thread
from pipegraph.replicas.replicate import sum_in_order


class Reducer:
    """Sums gradients over replicas.

    Hooks and buckets are fitted to the ``requires_grad`` flags and then, once, to the order of arrival.

    Args:
        parameters: per replica, in the same order.
        names: of the parameters, for messages.
        backends: by device; this object makes its streams there and leaves closing to the backends' owner.
        sparse: parameters known to have sparse gradients, which have no place in a bucket; others are
            found out in their first step.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Parameter]],
        names: Sequence[str],
        slots: Sequence[Slot],
        backends: Mapping[torch.device, Backend],
        sparse: Iterable[int] = (),
    ) -> None:
        self._parameters = [list(given) for given in parameters]
        self._names = list(names)
        self.streams = ReduceStreams(slots, backends)
        self._buckets: list[LiveBucket] = []  # in the order in which they are launched
        self._home: dict[int, LiveBucket] = {}  # of each parameter that has a place in one
        self._hooked: tuple[bool, ...] = ()
        self._handles: list[RemovableHandle] = []
        self._apart = set(sparse)
        self._arrived: list[int] = []  # the order in which gradients came in the first step
        self._order_known = self._laid_out = False
        # Of the present step; hooks run in several threads.
        self._lock = concurrency.Lock()
        self._open = False
        self._next = 0  # the first bucket that is not launched
        self._sparse: set[int] = set()
        self._leader = 0
        # Queues in C, because Ctrl-C can leave the lock of a condition taken.
        self._full: concurrency.SimpleQueue[LiveBucket | None] = concurrency.SimpleQueue()
        self._launched: concurrency.SimpleQueue[BaseException | None] = concurrency.SimpleQueue()
        launch = partial(self._launch_in_order, slots[0].device)
        self._thread = start_thread(launch, "pipegraph-reducer")

    def prepare(self) -> None:
        """Fit hooks and buckets to the present ``requires_grad`` flags. Only between backwards."""
        wanted = tuple(parameter.requires_grad for parameter in self._parameters[0])
        if wanted != self._hooked:
            self._take_hooks_off()
            self._handles = [
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._arrive, replica, index)
                )
                for replica, given in enumerate(self._parameters)
                for index, parameter in enumerate(given)
                if wanted[index]
            ]
            self._hooked = wanted
            self._arrived = [index for index in reversed(range(len(wanted))) if wanted[index]]
            self._order_known = self._laid_out = False
        if not self._laid_out:
            # Once more after the first step: the order in which gradients really came.
            seen = dict.fromkeys([*self._arrived, *self._home])
            order = [index for index in seen if self._hooked[index] and index not in self._apart]
            plans = plan_buckets(self._parameters[0], order, len(self._parameters))
            self._buckets = [self.streams.make(plan, self._parameters) for plan in plans]
            self._home = {index: live for live in self._buckets for index in live.plan.offsets}
            self._laid_out = True

    @property
    def layout(self) -> tuple[GradientBucket, ...]:
        return tuple(live.plan for live in self._buckets)

    # A step, in the caller's thread: begin, complete, release; or abort

    def begin(self, active: Sequence[int]) -> None:
        """Marks count from now on. `active` replicas run a backward; of the others ``.grad`` is taken."""
        self.prepare()
        with self._lock:
            self._open = True
            self._next = 0
            self._sparse = set()
            self._leader = active[0]
            if not self._order_known:
                self._arrived = []
            for live in self._buckets:
                live.marked = set()
                live.left = [
                    # What idle replicas have accumulated is added once all backwards have returned.
                    len(live.plan.offsets)
                    if replica in active
                    else int(any(given[i].grad is not None for i in live.plan.offsets))
                    for replica, given in enumerate(self._parameters)
                ]

    def _arrive(self, replica: int, index: int, parameter: torch.Tensor) -> None:
        """The hook. Runs in an autograd thread; never waits for a replica."""
        grad = parameter.grad
        if grad is None:
            return
        with self._lock:
            live = self._home.get(index)
            if not self._open or live is None:
                return
            if grad.requires_grad:
                raise ReplicaError(
                    "backward(create_graph=True) is not supported: use torch.autograd.grad in the loss"
                )
            if (replica, index) in live.marked:
                raise ReplicaError(
                    f"parameter {self._names[index]!r} of replica {replica} got a second gradient in one step: "
                    "activation checkpoints must use use_reentrant=False, and a loss must not use the model, which is "
                    "replica 0: return what it needs from forward=, as in lambda module, part: (module(part), "
                    "penalty(module))"
                )
            live.marked.add((replica, index))
            if grad.is_sparse:
                self._sparse.add(index)
        if not grad.is_sparse:
            self.streams.put(live, replica, index, grad)
            # The gradient lives on in its bucket: its own memory is free for the rest of the backward.
            parameter.grad = live.views[replica][index]
        with self._lock:
            live.left[replica] -= 1
            if live.left[replica] == 0:
                self.streams.arrived(live, replica)
            if replica == self._leader and not self._order_known:
                self._arrived.append(index)
            if self._open:
                self._launch_full()

    def _launch_full(self) -> None:
        while self._next < len(self._buckets) and not any(self._buckets[self._next].left):
            self._full.put(self._buckets[self._next])
            self._next += 1

    def complete(self) -> None:
        """All backwards have returned: reduce what is left, and make the current streams wait for everything.

        Every replica's ``.grad`` is the sum then: a view of a bucket, valid until :meth:`release`. Raises what the
        reduction raised.
        """
        for live in self._buckets:
            if any(live.left):
                self._fill(live)
                live.left = [0] * len(live.left)
        with self._lock:
            self._launch_full()
        self._await_launches()
        for live in self._buckets:
            self.streams.await_filled(live)
        marked = {index for live in self._buckets for _, index in live.marked}
        sums = {index: self._sum_of_sparse(index) for index in self._sparse | self._apart}
        for index in itertools.compress(range(len(self._hooked)), self._hooked):
            total = sums.get(index)
            for replica, given in enumerate(self._parameters):
                if total is not None:
                    given[index].grad = total.to(given[index].device, copy=True)
                else:
                    given[index].grad = self._home[index].views[replica][index] if index in marked else None
        self._laid_out = self._order_known and self._sparse <= self._apart
        self._order_known = True
        self._apart |= self._sparse

    def _sum_of_sparse(self, index: int) -> torch.Tensor | None:
        grads = [given[index].grad for given in self._parameters]
        parts = [grad.to(self._parameters[0][index].device) for grad in grads if grad is not None]
        return sum_in_order(parts) if parts else None

    def _await_launches(self) -> None:
        """The step gets no more gradients: wait for its launches; raises the first failure of them."""
        with self._lock:
            self._open = False
            launches, self._next = self._next, 0
        failures = [self._launched.get() for _ in range(launches)]
        for failure in filter(None, failures):
            raise failure

    def _fill(self, live: LiveBucket) -> None:
        """Marks, from their ``.grad``, what no hook has seen."""
        for index in live.plan.offsets:
            for replica, given in enumerate(self._parameters):
                grad = given[index].grad
                if grad is None or (replica, index) in live.marked:
                    continue
                if grad.is_sparse:
                    self._sparse.add(index)
                else:
                    self.streams.put(live, replica, index, grad)
                live.marked.add((replica, index))
        for replica in live.contributors() or [live.plan.owner]:
            for index in live.plan.offsets:
                if (replica, index) not in live.marked:
                    self.streams.put(live, replica, index, None)
            self.streams.arrived(live, replica)

    def release(self) -> None:
        """The reduced gradients have been used."""
        for replica in range(len(self._parameters)):
            self.streams.used(replica)

    def abort(self) -> None:
        """Forget a step that failed; nothing of it reaches a later one."""
        with suppress(Exception):  # the step has failed already
            self._await_launches()
        self.streams.drain(self._buckets)

    def stop(self) -> None:
        """End the launching thread and take the hooks off. Waits for nothing: it may run in a finalizer."""
        self._open = False
        self._full.put(None)
        self._take_hooks_off()

    def _take_hooks_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def join(self) -> None:
        """Wait for the launching thread after :meth:`stop`."""
        self._thread.join()

    def _launch_in_order(self, device: torch.device) -> None:
        """The launching thread."""
        while (live := self._full.get()) is not None:
            failure: BaseException | None = None
            try:
                bind_thread(device)
                self.streams.launch(live, live.contributors())
            except BaseException as error:
                failure = error
            self._launched.put(failure)
