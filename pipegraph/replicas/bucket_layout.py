"""Gradient hooks, the bucket of each gradient, and its way back to ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from pipegraph.replicas.buckets import plan_buckets
from pipegraph.replicas.coalesce import sum_in_order
from pipegraph.replicas.reduce_streams import LiveBucket, ReduceStreams

#: What a parameter's gradients are.
NONE, DENSE, SPARSE = 0, 1, 2
#: Called with the parameter when its gradient has been accumulated.
Hook = Callable[[torch.Tensor], None]


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
