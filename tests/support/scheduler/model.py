"""What a schedule runs."""

from __future__ import annotations

import functools
import random

from scheduler.kernel import CtrlC, Scheduler
from scheduler.vehicles import Greenlet, Vehicle


class Model:
    """A model: ``run`` builds what it tests, lets it work, and asserts its invariants.

    Attributes:
        scheduler: of this schedule.
        draw: random numbers of this schedule, for sizes and faults; a replay draws the same.
        weight: how many schedules of it are run for one of a whole loader, which takes about 10 ms.
        vehicle: what carries its tasks.
    """

    weight = 1
    vehicle: type[Vehicle] = Greenlet

    def __init__(self, scheduler: Scheduler, draw: random.Random) -> None:
        self.scheduler = scheduler
        self.draw = draw

    @classmethod
    def prepare(cls) -> None:
        """Called once before the schedules: imports what they must not import, and makes references."""

    def run(self) -> None:
        raise NotImplementedError

    def interrupt_in(self, steps: int | None) -> None:
        """Raise KeyboardInterrupt in the main task at one of its next switch points, or in a wait that it is in; None:
        not any more."""
        interrupt = functools.partial(self.scheduler.interrupt, self.scheduler.tasks[0], CtrlC())
        self.scheduler.alarm(steps, interrupt)
