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

from collections.abc import Callable, Iterable, Mapping, Sequence
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

#: What a parameter's gradients are.
NONE, DENSE, SPARSE = 0, 1, 2
#: Called with the parameter when its gradient has been accumulated.
Hook = Callable[[torch.Tensor], None]


class Reducer:
    """Sums gradients over replicas.

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
        self._layout = BucketLayout(self._parameters, self.streams, sparse)
        # Of the present step; hooks run in several threads.
        self._lock = concurrency.Lock()
        self._open = False
        self._next = 0  # the first bucket that is not launched
        self._sparse: set[int] = set()
        self._leader = 0
        self._flags: list[int] = []
        # Queues in C, because Ctrl-C can leave the lock of a condition taken.
        self._full: concurrency.SimpleQueue[LiveBucket | None] = concurrency.SimpleQueue()
        self._launched: concurrency.SimpleQueue[BaseException | None] = concurrency.SimpleQueue()
        launch = partial(self._launch_in_order, slots[0].device)
        self._thread = start_thread(launch, "pipegraph-reducer")

    def prepare(self) -> None:
        """Fit hooks and buckets to the present ``requires_grad`` flags. Only between backwards."""
        self._layout.fit(lambda replica, index: partial(self._arrive, replica, index))

    @property
    def layout(self) -> tuple[GradientBucket, ...]:
        return tuple(live.plan for live in self._layout.buckets)

    # A step, in the caller's thread: begin, complete, release; or abort

    def begin(self, active: Sequence[int]) -> None:
        """Marks count from now on. `active` replicas run a backward; of the others ``.grad`` is taken."""
        self.prepare()
        late = {
            index
            for replica, given in enumerate(self._parameters)
            if replica not in active
            for index, parameter in enumerate(given)
            if parameter.grad is not None
        }
        with self._lock:
            self._open = True
            self._next = 0
            self._sparse = set()
            self._leader = active[0]
            self._layout.begin()
            for live in self._layout.buckets:
                live.marked = set()
                live.pending = len(live.plan.offsets) * len(active)
                live.left = [len(live.plan.offsets)] * len(self._parameters)
                # What idle replicas have accumulated is added once all backwards have returned.
                live.pending += any(index in late for index in live.plan.offsets)

    def _arrive(self, replica: int, index: int, parameter: torch.Tensor) -> None:
        """The hook. Runs in an autograd thread; never waits for a replica."""
        grad = parameter.grad
        if grad is None:
            return
        with self._lock:
            live = self._layout.home.get(index)
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
            live.pending -= 1
            live.left[replica] -= 1
            if live.left[replica] == 0:
                self.streams.arrived(live, replica)
            if replica == self._leader:
                self._layout.arrived(index)
            if self._open:
                self._launch_full()

    def _launch_full(self) -> None:
        buckets = self._layout.buckets
        while self._next < len(buckets) and buckets[self._next].pending == 0:
            self._full.put(buckets[self._next])
            self._next += 1

    def complete(self) -> None:
        """All backwards have returned: reduce what is left, and make the current streams wait for everything.

        Raises what the reduction raised.
        """
        for live in self._layout.buckets:
            if live.pending > 0:
                self._fill(live)
                live.pending = 0
        with self._lock:
            self._launch_full()
        self._await_launches()
        for live in self._layout.buckets:
            self.streams.await_filled(live)
        with self._lock:
            self._flags = self._layout.kinds(self._sparse)
            self._layout.learn({index for index, flag in enumerate(self._flags) if flag == SPARSE})

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

    def give(self) -> None:
        """Set every replica's ``.grad`` to the sums: views of buckets, valid until :meth:`release`."""
        self._layout.give(self._flags)

    def release(self) -> None:
        """The reduced gradients have been used."""
        for replica in range(len(self._parameters)):
            self.streams.used(replica)

    def abort(self) -> None:
        """Forget a step that failed; nothing of it reaches a later one."""
        with suppress(Exception):  # the step has failed already
            self._await_launches()
        self.streams.drain(self._layout.buckets)

    def stop(self) -> None:
        """End the launching thread and take the hooks off. Waits for nothing: it may run in a finalizer."""
        self._open = False
        self._full.put(None)
        self._layout.detach()

    def join(self) -> None:
        """Wait for the launching thread after :meth:`stop`."""
        self._thread.join()

    def _launch_in_order(self, device: torch.device) -> None:
        """The launching thread."""
        bound = False
        while (live := self._full.get()) is not None:
            failure: BaseException | None = None
            try:
                if not bound:  # here, where a failure is noted
                    bind_thread(device)
                    bound = True
                self.streams.launch(live, live.contributors())
            except BaseException as error:
                failure = error
            self._launched.put(failure)


class BucketLayout:
    """Hooks and buckets, fitted to the ``requires_grad`` flags and then, once, to the order of arrival.

    It has no lock: the reducer calls :meth:`arrived` and :meth:`learn` under its own, and the rest while no hook runs.

    Attributes:
        buckets: in the order in which they are launched.
        home: the bucket of each parameter that has a place in one.
        hooked: by parameter, whether it has hooks.
        apart: parameters with sparse gradients, which have no place in a bucket.
        order_known: whether a step has shown in which order gradients come.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Parameter]],
        reduce_streams: ReduceStreams,
        apart: Iterable[int],
    ) -> None:
        self._parameters = parameters
        self._reduce_streams = reduce_streams
        self.buckets: list[LiveBucket] = []
        self.home: dict[int, LiveBucket] = {}
        self.hooked: tuple[bool, ...] = ()
        self.apart = set(apart)
        self.order_known = False
        self._rebuilt = False
        self._arrived: list[int] = []
        self._handles: list[RemovableHandle] = []

    def fit(self, hook_for: Callable[[int, int], Hook]) -> None:
        """Fit hooks and buckets to the present flags, and buckets to the order that has been seen.

        Args:
            hook_for: makes the hook of a replica's parameter, by its index. It is not kept: hooks know their
                reducer, and a circle would leave its threads to the garbage collector.
        """
        wanted = tuple(parameter.requires_grad for parameter in self._parameters[0])
        if wanted != self.hooked:
            self._hook(wanted, hook_for)
            order = [index for index in reversed(range(len(wanted))) if wanted[index]]
            order = [index for index in order if index not in self.apart]
            self._rebuilt = False
            self.order_known = False
            self._arrived = []
            self._lay_out(order)
        elif self.order_known and not self._rebuilt:
            # Once, after the first step: the order in which gradients really came.
            seen = dict.fromkeys(self._arrived)
            order = [*seen, *(index for index in self.home if index not in seen)]
            order = [index for index in order if index not in self.apart]
            self._rebuilt = True
            self._lay_out(order)

    def begin(self) -> None:
        if not self.order_known:
            self._arrived = []

    def arrived(self, index: int) -> None:
        """A parameter's gradient has come, on the replica whose order counts."""
        if not self.order_known:
            self._arrived.append(index)

    def learn(self, sparse: set[int]) -> None:
        """A step is complete, and these gradients were sparse."""
        self.order_known = True
        if not sparse <= self.apart:
            self.apart |= sparse
            self._rebuilt = False

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, wanted: tuple[bool, ...], hook_for: Callable[[int, int], Hook]) -> None:
        self.detach()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                hook_for(replica, index)
            )
            for replica, given in enumerate(self._parameters)
            for index, parameter in enumerate(given)
            if wanted[index]
        ]
        self.hooked = wanted

    def _lay_out(self, order: Sequence[int]) -> None:
        plans = plan_buckets(self._parameters[0], order, len(self._parameters))
        self.buckets = [
            self._reduce_streams.make(number, plan, self._parameters) for number, plan in enumerate(plans)
        ]
        self.home = {index: live for live in self.buckets for index in live.plan.offsets}

    # The way back: `flags` are what the gradients of each parameter are, on any replica

    def kinds(self, sparse: set[int]) -> list[int]:
        """By parameter what its gradients on these replicas are; all backwards have returned."""
        found = [NONE] * len(self._parameters[0])
        for live in self.buckets:
            for _, index in live.marked:
                found[index] = SPARSE if index in sparse else DENSE
        for index in self.apart:
            if self.hooked[index] and any(given[index].grad is not None for given in self._parameters):
                found[index] = SPARSE
        return found

    def give(self, flags: Sequence[int]) -> None:
        """Set every replica's ``.grad``: views of buckets, valid until these are written again."""
        sparse = self._sums_of_sparse(flags)
        for index, wanted in enumerate(self.hooked):
            for replica, given in enumerate(self._parameters if wanted else ()):
                if flags[index] == NONE:
                    given[index].grad = None
                elif index in sparse:
                    given[index].grad = sparse[index].to(given[index].device, copy=True)
                else:
                    given[index].grad = self.home[index].views[replica][index]

    def _sums_of_sparse(self, flags: Sequence[int]) -> dict[int, torch.Tensor]:
        """Sums of sparse gradients over replicas."""
        sums = {}
        for index, flag in enumerate(flags):
            if flag == SPARSE:
                first = self._parameters[0][index]
                grads = [given[index].grad for given in self._parameters]
                parts = [grad.to(first.device) for grad in grads if grad is not None]
                sums[index] = sum_in_order(parts)
        return sums
