"""Sums the gradients of all replicas in buckets during backward.

The contract; if the code differs, the code is wrong:

- A hook marks (parameter, replica) once per step. It copies the gradient into
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

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch.nn import Parameter

from pipegraph import concurrency
from pipegraph.device.backend import Backend, Slot
from pipegraph.device.opening import bind_thread
from pipegraph.errors import ReplicaError
from pipegraph.replicas.bucket_layout import SPARSE, BucketLayout, Hook
from pipegraph.replicas.buckets import GradientBucket
from pipegraph.replicas.build import uses_the_first
from pipegraph.replicas.reduce_streams import LiveBucket, ReduceStreams
from pipegraph.replicas.replica_threads import start_thread


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
        self._slots = list(slots)
        self._backends = backends
        self._set_up(sparse)

    def _set_up(self, sparse: Iterable[int]) -> None:
        self._generation: object | None = object()
        self.streams = ReduceStreams(self._slots, self._backends)
        self._layout = BucketLayout(self._parameters, self.streams, sparse)
        # Re-entrant, because `stop` may be called by the garbage collector. The caller's thread takes the lock itself:
        # Ctrl-C can come between the condition's taking it and the promise to give it back.
        self._lock = concurrency.RLock()
        self._condition = concurrency.Condition(self._lock)
        self._launched: concurrency.SimpleQueue[None] = concurrency.SimpleQueue()
        self._open = False
        self._forced = False
        self._launching = False
        self._next = 0
        self._failure: BaseException | None = None
        self._sparse: set[int] = set()
        self._leader = 0
        self._flags: list[int] = []
        self._homes: dict[int, int] = {}  # by a step's backward the replica that makes it
        self._thread = start_thread(partial(self._launch_in_order, self._generation), "pipegraph-reducer")

    def prepare(self) -> None:
        """Fit hooks and buckets to the present ``requires_grad`` flags. Only between backwards."""
        self._homes = {}
        self._layout.fit(self._hook_for)

    def _hook_for(self, replica: int, index: int) -> Hook:
        return partial(self._hooked, self._generation, replica, index)

    def renew(self) -> None:
        """Build everything anew after an interrupt, which may have left any of it half done. Waits for what runs.

        The order that earlier steps have shown is lost.
        """
        try:
            while True:
                self._lock.release()  # taken by this thread, and not given back
        except RuntimeError:
            pass
        self._end_launches()
        self._thread.join()
        self._layout.detach()
        self.streams.drain(())
        for backend in self._backends.values():
            backend.synchronize()  # what still reads the buckets' memory
        self._set_up(self._layout.apart)

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
            self._launched = concurrency.SimpleQueue()
            self._open = True
            self._forced = False
            self._next = 0
            self._failure = None
            self._sparse = set()
            self._leader = active[0]
            self._layout.begin()
            for live in self._layout.buckets:
                live.marked = set()
                live.pending = len(live.plan.offsets) * len(active)
                live.left = [len(live.plan.offsets)] * len(self._parameters)
                # What idle replicas have accumulated is added once all backwards have returned.
                live.pending += any(index in late for index in live.plan.offsets)

    def watch(self, replica: int, loss: torch.Tensor) -> None:
        """A step's backward of this replica begins at `loss`: gradients that it gives another replica are refused."""
        homes = self._homes

        def note(grad: torch.Tensor) -> None:
            homes[torch._C._current_graph_task_id()] = replica

        if loss.requires_grad:
            loss.register_hook(note)  # type: ignore[no-untyped-call]

    def _hooked(self, generation: object, replica: int, index: int, parameter: torch.Tensor) -> None:
        if generation is self._generation:  # an interrupt may have come before a hook's handle was kept
            self._arrive(replica, index, parameter)

    def _arrive(self, replica: int, index: int, parameter: torch.Tensor) -> None:
        """The hook. Runs in an autograd thread; never waits for a replica."""
        grad = parameter.grad
        if grad is None:
            return
        self._refuse_foreign(replica, index)
        with self._lock:
            live = self._layout.home.get(index)
            if not self._open or live is None:
                return
            if grad.requires_grad:
                raise ReplicaError(
                    "backward(create_graph=True) is not supported: use torch.autograd.grad in the loss"
                )
            if live.pending == 0:  # launched, or about to be
                raise ReplicaError(
                    f"parameter {self._names[index]!r} got a second gradient after its bucket was full: "
                    "activation checkpoints must use use_reentrant=False"
                )
            if grad.is_sparse:
                self._sparse.add(index)
        if not grad.is_sparse:
            self.streams.put(live, replica, index, grad)
            # The gradient lives on in its bucket: its own memory is free for the rest of the backward.
            parameter.grad = live.views[replica][index]
        with self._lock:
            if (replica, index) not in live.marked:
                live.marked.add((replica, index))
                live.pending -= 1
                live.left[replica] -= 1
                if live.left[replica] == 0:
                    self.streams.arrived(live, replica)
                if replica == self._leader:
                    self._layout.arrived(index)
                if live.pending == 0:
                    self._condition.notify_all()

    def _refuse_foreign(self, replica: int, index: int) -> None:
        home = self._homes.get(torch._C._current_graph_task_id(), replica)
        if home != replica:
            raise ReplicaError(uses_the_first(home, self._names[index]))

    def complete(self) -> None:
        """All backwards have returned: reduce what is left, and make the current streams wait for everything.

        Raises what the reduction raised.
        """
        late = [live for live in self._layout.buckets if live.pending > 0]
        for live in late:
            self._fill(live)
        with self._lock:
            self._forced = True
            self._condition.notify_all()
        while self._launching or (self._next < len(self._layout.buckets) and self._failure is None):
            self._launched.get()  # in C, and so safe from Ctrl-C, as a condition's wait is not
        if self._failure is not None:
            raise self._failure
        for live in self._layout.buckets:
            self.streams.await_filled(live)
        with self._lock:
            self._open = False
            self._flags = self._layout.kinds(self._sparse)
            self._layout.learn({index for index, flag in enumerate(self._flags) if flag == SPARSE})

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
        with self._lock:
            self._open = False
            self._condition.notify_all()
        while self._launching:
            self._launched.get()
        self.streams.drain(self._layout.buckets)

    def stop(self) -> None:
        """End the launching thread and take the hooks off. Waits for nothing: it may run in a finalizer."""
        self._end_launches()
        self._layout.detach()

    def _end_launches(self) -> None:
        with self._lock:
            self._generation = None
            self._open = False
            self._condition.notify_all()

    def join(self) -> None:
        """Wait for the launching thread after :meth:`stop`."""
        self._thread.join()

    # The launching thread

    def _launch_in_order(self, generation: object) -> None:
        bound = False
        while True:
            with self._lock:
                self._launching = False
                self._launched.put(None)
                self._condition.wait_for(lambda: self._generation is not generation or self._has_work())
                if self._generation is not generation:
                    return
                number = self._next
                self._launching = True
            try:
                if not bound:  # here, where a failure is noted
                    bind_thread(self._slots[0].device)
                    bound = True
                live = self._layout.buckets[number]
                self.streams.launch(live, live.contributors())
            except BaseException as failure:
                with self._lock:
                    self._failure = failure
                    self._open = False
            with self._lock:
                self._next += 1

    def _has_work(self) -> bool:
        buckets = self._layout.buckets
        if not self._open or self._next >= len(buckets):
            return False
        return self._forced or buckets[self._next].pending == 0
