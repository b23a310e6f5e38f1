"""What a schedule runs."""

from __future__ import annotations

import random

from scheduler.kernel import Scheduler, Task


class Model:
    """A model: ``run`` builds what it tests, lets it work, and asserts its invariants.

    Attributes:
        scheduler: of this schedule; ``scheduler.watch`` is where a model checks what must hold at every step.
        draw: random numbers of this schedule, for sizes and faults; a replay draws the same.
        weight: how many schedules of it are run for one of a whole loader, which takes about 10 ms.
        interrupts: whether Ctrl-C is among its faults.
    """

    weight = 1
    interrupts = True

    def __init__(self, scheduler: Scheduler, draw: random.Random) -> None:
        self.scheduler = scheduler
        self.draw = draw
        self._interrupt_in: int | None = None

    @classmethod
    def prepare(cls) -> None:
        """Called once before the schedules: imports what they must not import, and makes references."""

    def run(self) -> None:
        raise NotImplementedError

    def interrupt_in(self, steps: int | None) -> None:
        """Raise KeyboardInterrupt in the main task at one of its next switch points, or in a wait that it is in; None:
        not any more."""
        self._interrupt_in = steps
        self.scheduler.watch = None if steps is None or not self.interrupts else self._count

    def _count(self, task: Task) -> None:
        assert self._interrupt_in is not None
        self._interrupt_in -= 1
        if self._interrupt_in < 0:
            self.scheduler.watch = None
            self.scheduler.interrupt(self.scheduler.tasks[0], KeyboardInterrupt())
