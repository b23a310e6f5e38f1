"""Runs a model under many schedules, and one schedule again."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from scheduler import primitives, threads
from scheduler.kernel import Abandoned, CtrlC, Scheduler
from scheduler.lines import switch_points
from scheduler.model import Model
from scheduler.strategies import Pct, Random, Replay, read, written

NAMES = {
    primitives: ("Condition", "Event", "Lock", "RLock", "SimpleQueue"),
    threads: (
        *("Thread", "current_thread", "get_ident", "get_native_id", "local", "monotonic", "monotonic_ns"),
        "start_new_thread",
    ),
}
"""What is replaced in ``pipegraph.concurrency``, and by which module; the rest serves as it is."""


@dataclass
class Report:
    """What an exploration did.

    Attributes:
        schedules: how many were run; ``different``: a hash of each one's choices.
        steps: switch points of all of them.
        places: ``(file, line)`` of the package where they lie, from each tenth schedule.
    """

    model: str
    schedules: int = 0
    different: set[int] = field(default_factory=set)
    steps: int = 0
    seconds: float = 0.0
    places: set[tuple[str, int]] = field(default_factory=set)

    @property
    def distinct(self) -> int:
        """How many differ in a choice."""
        return len(self.different)

    def add(self, other: Report) -> None:
        """What another exploration did."""
        self.schedules += other.schedules
        self.steps += other.steps
        self.seconds += other.seconds
        self.different |= other.different
        self.places |= other.places

    def __str__(self) -> str:
        rate = self.schedules / self.seconds if self.seconds else 0.0
        return (
            f"{self.model}: {self.schedules} schedules, {self.distinct} distinct, "
            f"{self.steps / max(1, self.schedules):.0f} switch points each, {rate:.0f} a second"
        )


class Found(AssertionError):
    """A schedule in which the model fails; the message says how to run it again."""


def explore(
    model: type[Model],
    schedules: int | None = None,
    seconds: float | None = None,
    first_seed: int = 0,
    strategies: Iterable[Any] | None = None,
    lines: tuple[str, ...] = (),
) -> Report:
    """Run a model under many schedules: random ones and PCT of depth 2 to 4 in turn.

    Args:
        schedules: how many; or
        seconds: for how long.
        strategies: in place of random and PCT, ``Exhaustive(2)`` say.
        lines: files of which every line is a switch point, ``("engine/channel.py",)`` say (slower still).

    Raises:
        Found: with the failure, its seed and its schedule.
    """
    report = Report(model.__name__)
    offsets: set[tuple[CodeType, int]] = set()
    model.prepare()
    salt = zlib.crc32(model.__name__.encode())
    collect_at = 0
    begun = time.perf_counter()
    with _quiet(), switch_points(lines):
        chosen = _drawn(first_seed, report) if strategies is None else iter(strategies)
        for number, strategy in enumerate(chosen):
            if schedules is not None and number >= schedules:
                break
            if seconds is not None and time.perf_counter() - begun > seconds:
                break
            seed = first_seed + number if strategies is None else 0
            scheduler = _scheduler(model, strategy, lines)
            scheduler.seen = offsets if number % 10 == 0 else None
            try:
                run_once(model, scheduler, seed)
            except (Exception, CtrlC) as error:
                raise Found(
                    f"{model.__name__} fails in schedule {number} ({strategy.name}) after {scheduler.steps} steps.\n"
                    f"Again: pytest tests/schedules -k {model.__name__} "
                    f"--schedule={'lines.' if lines else ''}{seed}.{written(scheduler.choices)}"
                ) from error
            report.schedules += 1
            report.steps += scheduler.steps
            report.different.add(hash((salt, *scheduler.choices)))
            if number % 500 == 499:
                gc.collect()
            elif (
                report.steps >= collect_at
            ):  # so that memory is used again while the processor's cache has it
                gc.collect(0)
                collect_at = report.steps + 1000
    report.places = {
        (code.co_filename, _line_of(code, offset))
        for code, offset in offsets
        if "/pipegraph/" in code.co_filename
    }
    report.seconds = time.perf_counter() - begun
    return report


def replay(model: type[Model], schedule: str, lines: tuple[str, ...] = ()) -> None:
    """Run one schedule again: ``SEED.CHOICES`` as a failure prints it."""
    seed, choices = schedule.split(".", 1)
    strategy = Replay(read(choices))
    model.prepare()
    with switch_points(lines):
        run_once(model, _scheduler(model, strategy, lines), int(seed))
    assert not strategy.diverged, "the code has other switch points than when this schedule was written"


def _scheduler(model: type[Model], strategy: Any, lines: tuple[str, ...]) -> Scheduler:
    # An endless loader's queues take 1,024 light rows each: what starves the loop runs 50,000 points before they fill.
    return Scheduler(strategy, 5_000_000 if lines else 500_000, vehicle=model.vehicle)


def run_once(model: type[Model], scheduler: Scheduler, seed: int) -> None:
    """One schedule, in the calling thread."""
    with _quiet(), installed(scheduler):
        scheduler.run(model(scheduler, random.Random(seed)).run)


def _line_of(code: CodeType, offset: int) -> int:
    return next(line or 0 for first, end, line in code.co_lines() if first <= offset < end)


def _drawn(first_seed: int, report: Report) -> Iterator[Any]:
    seed = first_seed
    while True:
        steps = report.steps // report.schedules if report.schedules else 500
        if seed % 2:
            yield Pct(seed, 2 + seed // 2 % 3, steps)
        else:
            yield Random(seed, (0.05, 0.3, 0.9)[seed // 2 % 3])
        seed += 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No garbage collection inside of schedules: a finaliser would run at a step that a replay does not repeat. And
    one that runs while a failed schedule is unwound is unwound too, which is no news."""
    enabled, hook = gc.isenabled(), sys.unraisablehook
    gc.disable()
    sys.unraisablehook = lambda about: None if about.exc_type is Abandoned else hook(about)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if enabled:
            gc.enable()


def _module_locks() -> list[tuple[Any, str, type]]:
    """Locks and thread-locals that modules made as they were imported."""
    import _thread

    kinds = {
        _thread.LockType: primitives.Lock,
        _thread.RLock: primitives.RLock,
        threading.local: threads.local,
    }
    return [
        (module, name, kinds[type(value)])
        for key, module in list(sys.modules.items())
        if key.startswith("pipegraph")
        for name, value in vars(module).items()
        if type(value) in kinds
    ]


@contextlib.contextmanager
def installed(scheduler: Scheduler) -> Iterator[None]:
    """While inside, what ``pipegraph.concurrency`` offers belongs to the scheduler, and clocks are virtual."""
    from pipegraph import concurrency, global_generators

    primitives.activate(scheduler)
    put_back: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        put_back.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        for source, names in NAMES.items():
            for name in names:
                put(concurrency, name, getattr(source, name))
        for module, name, kind in _LOCKS or _find():
            put(module, name, kind())
        for module, name, value in _CLOCKS:
            put(module, name, value)
        yield
    finally:
        for owner, name, value in reversed(put_back):
            setattr(owner, name, value)
        primitives.activate(None)
        global_generators.leave()  # workers that ran as greenlets have entered for this thread, which they shared


_LOCKS: list[tuple[Any, str, type]] = []
_CLOCKS: list[tuple[Any, str, Any]] = []


def _find() -> list[tuple[Any, str, type]]:
    """Modules' locks and clocks, looked up once: models import what they test before they run."""
    _LOCKS[:] = _module_locks()
    virtual = {
        time.perf_counter_ns: threads.monotonic_ns,
        time.perf_counter: threads.monotonic,
        time: threads.virtual_time,
    }
    _CLOCKS[:] = [
        (module, name, virtual[value])
        for key, module in list(sys.modules.items())
        if key.startswith("pipegraph")
        for name, value in vars(module).items()
        if name in ("perf_counter", "perf_counter_ns", "time")
    ]
    return _LOCKS
