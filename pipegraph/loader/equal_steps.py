"""The agreement that gives all ranks equally many steps when lengths are unknown.

Each rank reports how many chunks of the epoch it is sure of (delivered, or waiting in its last queue), and whether its
epoch has ended. An asynchronous all-reduce on a process group of the loader's own takes the minimum. Its result is read
a window of steps later, so that in the steady state no step waits for it. Each rank may deliver as many chunks as the
minimum says; if the rank with the minimum has ended, all end there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pipegraph.errors import GraphError


class OwnPass(Protocol):
    """This rank's pass."""

    def sure(self) -> tuple[int, bool]:
        """How many chunks of this epoch this rank is sure of now, and whether the epoch has no more."""

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
            self.allowed, more = divmod(self._pending(), 2)
            self._pending = None
            self.over = not more
            if not self.over and self.allowed > step:
                self._post(step, own)  # read when this window is used up
        return step < self.allowed

    def _post(self, step: int, own: OwnPass) -> None:
        if own.sure()[0] <= step:
            own.wait_for_more()
        chunks, ended = own.sure()
        # One integer, whose minimum is the agreement: at equal counts a rank that has ended comes first.
        self._pending = self._begin(2 * chunks + (0 if ended else 1))


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
