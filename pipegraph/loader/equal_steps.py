"""The agreement that gives all ranks equally many steps when lengths are unknown.

Each rank reports how many chunks of the epoch it is sure of (delivered, or waiting in its last queue), and whether its
epoch has ended. An asynchronous all-reduce on a process group of the loader's own takes the minimum. Its result is read
a window of steps later, so that in the steady state no step waits for it. Each rank may deliver as many chunks as the
minimum says; if the rank with the minimum has ended, all end there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pipegraph.errors import GraphError
from pipegraph.loader.options import LoaderOptions
from pipegraph.loader.position import Place
from pipegraph.planning.plan import Plan

logger = logging.getLogger("pipegraph")


@dataclass(frozen=True)
class Sure:
    """One rank's report: how many chunks of this epoch it is sure of, and whether the epoch has no more."""

    chunks: int
    ended: bool

    def encode(self) -> int:
        """One integer, whose minimum over ranks is the agreement: at equal counts a rank that has ended comes first."""
        return 2 * self.chunks + (0 if self.ended else 1)

    @staticmethod
    def decode(value: int) -> Sure:
        """The inverse of :meth:`encode`."""
        return Sure(value // 2, value % 2 == 0)


class OwnPass(Protocol):
    """This rank's pass."""

    def sure(self) -> Sure:
        """What this rank is sure of now."""

    def wait_for_more(self) -> None:
        """Blocks until it is sure of more, or its epoch has ended."""


class Agreement:
    """The rounds of one pass. All ranks make the same rounds, because each starts one only after reading the last.

    Args:
        begin: starts a minimum of one integer over all ranks; returns a function that waits for the result.
    """

    def __init__(self, begin: Callable[[int], Callable[[], int]]) -> None:
        self._begin = begin
        self._pending: Callable[[], int] | None = None
        self.allowed = 0
        self.over = False

    def may_deliver(self, step: int, own: OwnPass) -> bool:
        """Whether chunk ``step`` may be delivered; blocks for as many rounds as it takes to know.

        ``own`` is passed to every call and never kept: a pass that was left must be freed with its last reference.
        """
        while step >= self.allowed and not self.over:
            if self._pending is None:
                self._post(step, own)
            assert self._pending is not None
            agreed = Sure.decode(self._pending())
            self._pending = None
            self.allowed = agreed.chunks
            self.over = agreed.ended
            if not self.over and self.allowed > step:
                self._post(step, own)  # read when this window is used up
        return step < self.allowed

    def _post(self, step: int, own: OwnPass) -> None:
        if own.sure().chunks <= step:
            own.wait_for_more()
        self._pending = self._begin(own.sure().encode())


def minimum_over(group: Any) -> Callable[[int], Callable[[], int]]:
    """An asynchronous all_reduce(MIN) of one integer on a group of this loader's own."""
    import torch
    import torch.distributed as dist

    def begin(value: int) -> Callable[[], int]:
        number = torch.tensor([value], dtype=torch.int64)
        work = dist.all_reduce(number, op=dist.ReduceOp.MIN, group=group, async_op=True)

        def read() -> int:
            if work is not None:
                work.wait()
            return int(number[0])

        return read

    return begin


def own_group(world_size: int) -> Any:
    """A gloo group for the agreement; all ranks make it together, at their first pass.

    Raises:
        GraphError: there is no process group of that size to agree in.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != world_size:
        raise GraphError(
            f"equal_steps=True needs an initialised torch.distributed group of {world_size} ranks to agree in; "
            "call torch.distributed.init_process_group(...) before the first pass"
        )
    return dist.new_group(backend="gloo")


def check_counts_known(plan: Plan, world_size: int) -> None:
    """Raises GraphError if ranks may make different numbers of steps and ``equal_steps`` is not given."""
    unknown = plan.unknown_counts() if world_size > 1 else []
    if unknown:
        raise GraphError(
            f"stages {', '.join(map(repr, unknown))} make the number of steps depend on the data: with "
            f"{world_size} ranks say loader(equal_steps=True) to let the ranks agree, or equal_steps=False if they may "
            "differ"
        )


def warn_of_unequal(plan: Plan, epoch: int, world_size: int) -> None:
    """Warn if the first and the last rank make different numbers of steps."""
    first, last = (plan.steps(epoch, rank, world_size) for rank in (0, world_size - 1))
    if first != last:
        logger.warning(
            "graph %r: epoch %d has %s steps on rank 0 and %s on rank %d, and ranks that wait for each other in "
            "every step hang at the end; loader(equal_steps=True) ends all at the same step, equal_steps=False "
            "says that they may differ",
            plan.graph_name,
            epoch,
            first,
            last,
            world_size - 1,
        )


def length_of(plan: Plan, place: Place, options: LoaderOptions) -> int:
    """Chunks of the epoch that a pass from this place delivers; see :meth:`Loader.__len__`."""
    if place.nothing:
        return 0
    if place.start.stream is not None or place.later:
        raise TypeError("this loader has no length in this epoch: it continues with other ranks' parts")
    rank, world_size = options.own()
    ranks = range(world_size) if options.equal_steps else (rank,)
    lengths = [plan.steps(place.epoch, each, world_size, place.start.history) for each in ranks]
    if None in lengths:
        names = ", ".join(map(repr, plan.unknown_counts()))
        raise TypeError(f"this loader has no length: stages {names} make it depend on the data")
    if place.start.chunks is None:
        raise TypeError("this loader has no length in this epoch: it continues in a graph that was changed")
    return min(length for length in lengths if length is not None) - place.start.chunks
