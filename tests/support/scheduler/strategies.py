"""How a schedule is chosen: at random, by few preemptions (PCT), exhaustively up to a bound, or as written down.

PCT: Burckhardt, Kothari, Musuvathi, Nagarakatte, "A Randomized Scheduler with Probabilistic Guarantees of Finding
Bugs", ASPLOS 2010. Preemption bound: Musuvathi, Qadeer, "Iterative Context Bounding for Systematic Testing of
Multithreaded Programs", PLDI 2007.
"""

from __future__ import annotations

import base64
import bisect
import math
import random
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence

from scheduler.kernel import Task


class Random:
    """Each switch point lets another task run with probability ``switch``; who, is drawn evenly."""

    follows_ready = False

    def __init__(self, seed: int, switch: float = 0.3) -> None:
        self.name = f"random:{seed}"
        self._draw = random.Random(seed).random
        self._scale = 1 / math.log(1 - switch)
        self.at = 1 + int(math.log(1 - self._draw()) * self._scale)

    def choose(self, ready: list[Task], current: Task | None, step: int) -> Task:
        if current is not None:
            self.at = step + 1 + int(math.log(1 - self._draw()) * self._scale)  # geometric
        return ready[int(self._draw() * len(ready))]


class Pct:
    """The ready task of the highest priority runs; at ``depth - 1`` drawn steps the running one falls below all.

    Args:
        steps: about how many steps a schedule has.
    """

    follows_ready = True

    def __init__(self, seed: int, depth: int, steps: int) -> None:
        self.name = f"pct{depth}:{seed}"
        self._draw = random.Random(seed)
        self._priority: dict[Task, float] = {}
        self._lowest = 0.0
        self._changes = sorted((self._draw.randrange(max(1, steps)) for _ in range(depth - 1)), reverse=True)
        self.at = 0

    def choose(self, ready: list[Task], current: Task | None, step: int) -> Task:
        priority = self._priority
        for task in ready:
            if task not in priority:
                priority[task] = 1.0 + self._draw.random()
        first = max(ready, key=priority.__getitem__)
        while self._changes and step >= self._changes[-1]:
            self._changes.pop()
            self._lowest -= 1.0
            priority[first] = self._lowest
            first = max(ready, key=priority.__getitem__)
        self.at = self._changes[-1] if self._changes else sys.maxsize
        return first


class Replay:
    """The choices of an earlier schedule, then the first ready task.

    Attributes:
        diverged: whether a choice could not be made as written: the code has changed since.
    """

    follows_ready = False

    def __init__(self, choices: Sequence[int], name: str = "replay") -> None:
        self.name = name
        self.diverged = False
        self._choices = dict(zip(choices[::2], choices[1::2], strict=True))
        self._steps = [*choices[::2], sys.maxsize]
        self.at = self._steps[0]

    def choose(self, ready: list[Task], current: Task | None, step: int) -> Task:
        number = self._choices.get(step)
        self.at = self._steps[bisect.bisect_right(self._steps, step)]
        for task in ready:
            if task.number == number:
                return task
        self.diverged = True
        return current if current is not None else ready[0]


class _Prefix:
    """One schedule of an exhaustive search: a given prefix, then no preemption."""

    at, follows_ready = 0, False

    def __init__(self, prefix: Sequence[int], name: str) -> None:
        self.name = name
        self._prefix = prefix
        self.options: list[
            tuple[tuple[int, ...], int | None]
        ] = []  # what was ready, and who could have gone on
        self.made: list[int] = []

    def choose(self, ready: list[Task], current: Task | None, step: int) -> Task:
        if len(ready) == 1:
            return ready[0]
        at = len(self.made)
        numbers = tuple(sorted(task.number for task in ready))
        wanted = self._prefix[at] if at < len(self._prefix) else (
            current.number if current is not None else numbers[0]
        )  # fmt: skip
        chosen = next(task for task in ready if task.number == wanted)
        self.options.append((numbers, None if current is None else current.number))
        self.made.append(wanted)
        return chosen


class Exhaustive:
    """All schedules with at most ``preemptions`` preemptions: iterate, and run each strategy before taking the next."""

    def __init__(self, preemptions: int) -> None:
        self._bound = preemptions

    def __iter__(self) -> Iterator[_Prefix]:
        waiting: list[tuple[list[int], int]] = [([], 0)]  # a prefix, and the preemptions in it
        number = 0
        while waiting:
            prefix, spent = waiting.pop()
            run = _Prefix(prefix, f"exhaustive{self._bound}:{number}")
            number += 1
            yield run
            for step in range(len(prefix), len(run.made)):
                ready, current = run.options[step]
                cost = spent + (current is not None)
                if cost > self._bound:
                    continue
                waiting += [([*run.made[:step], other], cost) for other in ready if other != run.made[step]]


def written(choices: Sequence[int]) -> str:
    """Choices as text for ``--schedule``."""
    return base64.urlsafe_b64encode(zlib.compress(array("I", choices).tobytes(), 9)).decode()


def read(text: str) -> list[int]:
    """The choices that :func:`written` wrote."""
    return array("I", zlib.decompress(base64.urlsafe_b64decode(text))).tolist()
