"""How many steps an epoch has on a rank, and the agreement that gives all ranks equally many where that is unknown.

Each rank reports how many chunks of the epoch it is sure of (delivered, or waiting in its last queue), and whether its
epoch has ended. An asynchronous all-reduce on a process group of the loader's own takes the minimum. Its result is read
a window of steps later, so that in the steady state no step waits for it. Each rank may deliver as many chunks as the
minimum says; if the rank with the minimum has ended, all end there. Each report also says in which epoch the rank is:
ranks of different epochs (after states from different points of their loops) would end one of them early.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pipegraph.engine.stage.ledger import Ledger
from pipegraph.errors import DataError, GraphError
from pipegraph.loader.options import LoaderOptions
from pipegraph.loader.place import Place
from pipegraph.planning.plan import Plan

if TYPE_CHECKING:
    from pipegraph.loader.epoch_pass import Pass

Numbers = Sequence[int]

OTHER_EPOCHS = (
    "equal_steps=True: the ranks are in different epochs, and would end one of them before all of it was delivered: "
    "rank {} of {} is in epoch {}, all are in epochs {} to {}. Load on all ranks states that were saved at the same "
    "point of the loop (all inside it, or all after it), leave passes at the same step on all ranks, or call "
    "set_epoch() with the same number on every rank"
)


class Agreement:
    """The rounds of one pass. All ranks make the same rounds, because each starts one only after reading the last.

    Args:
        begin: starts the minimum over all ranks of each of some integers; returns a function that waits for the result.
    """

    def __init__(self, begin: Callable[[Numbers], Callable[[], Numbers]]) -> None:
        self._begin = begin
        self._pending: Callable[[], Numbers] | None = None
        self.allowed = 0
        self.over = False

    def may_deliver(self, step: int, own: Pass) -> bool:
        """Whether chunk ``step`` may be delivered; blocks for as many rounds as it takes to know.

        ``own`` is passed to every call and never kept: a pass that was left must be freed with its last reference.

        Raises:
            DataError: ranks are in different epochs; all ranks raise it in the same round.
        """
        while step >= self.allowed and not self.over:
            if self._pending is None:
                self._post(step, own)
            assert self._pending is not None
            agreed, first, last = self._pending()
            self._pending = None
            if first != -last:
                raise DataError(OTHER_EPOCHS.format(*own.own, own.epoch, first, -last))
            self.allowed, more = divmod(agreed, 2)
            self.over = not more
            if not self.over and self.allowed > step:
                self._post(step, own)  # read when this window is used up
        return step < self.allowed

    def _post(self, step: int, own: Pass) -> None:
        if own.sure()[0] <= step:
            own.wait_for_more()
        chunks, ended = own.sure()
        # The minimum of the first is the agreement: at equal counts a rank that has ended comes first.
        self._pending = self._begin((2 * chunks + (0 if ended else 1), own.epoch, -own.epoch))


def minimum_over(group: Any) -> Callable[[Numbers], Callable[[], Numbers]]:
    """An asynchronous all_reduce(MIN) of some integers on a group of this loader's own."""
    import torch
    import torch.distributed as dist

    def begin(values: Numbers) -> Callable[[], Numbers]:
        numbers = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=group, async_op=True)

        def read() -> Numbers:
            if work is not None:
                work.wait()
            return list(map(int, numbers))

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


def _steps(plan: Plan, place: Place, rank: int, world_size: int, seed: int | None) -> int | None:
    """Chunks of the whole epoch on a rank, those before this place among them; None where the data decides."""
    steps = plan.steps(place.epoch, rank, world_size, seed, place.start.history)
    return None if steps is None else steps + (place.dealt or 0)


def warn_of_unequal(plan: Plan, place: Place, world_size: int, seed: int | None) -> None:
    """Warn if the first and the last rank make different numbers of steps."""
    first, last = (_steps(plan, place, rank, world_size, seed) for rank in (0, world_size - 1))
    if first != last:
        logging.getLogger("pipegraph").warning(
            "graph %r: epoch %d has %s steps on rank 0 and %s on rank %d, and ranks that wait for each other in "
            "every step hang at the end; loader(equal_steps=True) ends all at the same step, equal_steps=False "
            "says that they may differ",
            plan.graph_name,
            place.epoch,
            first,
            last,
            world_size - 1,
        )


def length_of(plan: Plan, place: Place, options: LoaderOptions, ledger: Ledger, seed: int | None) -> int:
    """Chunks of the epoch that a pass from this place delivers; see :meth:`Loader.__len__`."""
    if place.nothing:
        return 0
    others = place.start.stream is not None or place.later
    left_out = place.restored and ledger.resumed_without == place.epoch
    if others or left_out or place.dealt is None:
        raise TypeError(
            "this loader has no length in this epoch: it continues in a graph that was changed, or with other ranks' "
            "parts, or samples of it were left out before"
        )
    rank, world_size = options.own()
    ranks = range(world_size) if options.equal_steps else (rank,)
    lengths = [_steps(plan, place, each, world_size, seed) for each in ranks]
    if None in lengths:
        names = ", ".join(map(repr, plan.unknown_counts()))
        raise TypeError(f"this loader has no length: it depends on the data in {names}")
    return min(length for length in lengths if length is not None) - place.first
