"""A scheduler that the test holds: tasks of which one runs at a time, in an order that a number gives.

``explore`` runs a model many times; ``docs/schedules.md`` says how to write a model and how to replay a failure.
"""

from scheduler.explore import (
    Found as Found,
    Report as Report,
    explore as explore,
    replay as replay,
    run_once as run_once,
)
from scheduler.kernel import Deadlock as Deadlock, Hung as Hung, Scheduler as Scheduler
from scheduler.strategies import (
    Exhaustive as Exhaustive,
    Pct as Pct,
    Random as Random,
    Replay as Replay,
)
from scheduler.vehicles import Greenlet as Greenlet, RealThread as RealThread
