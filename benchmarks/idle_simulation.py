"""The simulation behind ``idle_ratio.py``, which says what is simulated and how: trainers, loads, and the clock."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import deque

import numpy as np
import numpy.typing as npt

from pipegraph.order import LaneOrder, PartOrder

PARTS, PART_BYTES, SAMPLES = 16_000, 16 * 10**9, 156_250
BLOCKS_PER_PART, LANES, OPENING = 125, 15, 256
TRAIN_S = 6 * 3_600.0

FloatArray = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Scene:
    """One simulation: times in seconds, rates in bytes per second and trainer; ``lanes`` per trainer, 0 for parts."""

    trainers: int
    rate: float
    train_s: float
    barrier: bool
    preloading: bool
    jitter: float
    held: int
    spread: float = 0.1
    parts: int = PARTS
    lanes: int = 0

    @property
    def load_s(self) -> float:
        """T_load, the mean."""
        return PART_BYTES / self.rate


class Trainer:
    """One trainer's parts, or blocks, in the order of their first use: which are loaded, loading, or yet to be started.

    Its position is in seconds of training done; loading goes by the clock.

    Args:
        needed: the position at which each is first used, growing; what is needed at 0 is start-up.
        done: the position behind its last use.
        limit: bytes that it may hold.
    """

    def __init__(
        self,
        scene: Scene,
        needed: FloatArray,
        done: FloatArray,
        nbytes: FloatArray,
        load_s: FloatArray,
        limit: float,
    ) -> None:
        self.scene, self.limit = scene, limit
        self.needed, self.done = needed.tolist(), done.tolist()
        self.nbytes, self.load_s = nbytes.tolist(), load_s.tolist()
        self.using = (
            int((needed <= 0).sum()) - 1
        )  # the last one whose use has begun; it may not be loaded yet
        self.loaded = 0  # so far, in order
        self.started = 0  # those whose loading was asked for
        self.queue: deque[int] = deque()
        self.in_use: list[tuple[float, float]] = []  # a heap: (when it is done, bytes) of those started
        self.held = 0.0
        self.loading = False

    @property
    def waits(self) -> bool:
        """Whether something that is in use by now is not there."""
        return self.loaded <= self.using

    def next_switch(self) -> float | None:
        """The position at which the next one is needed."""
        return self.needed[self.using + 1] if self.using + 1 < len(self.needed) else None

    def start_due(self, position: float) -> None:
        """Start what is in use by now, and read ahead as far as there is room."""
        while self.started <= self.using:
            self._start()
        if not self.scene.preloading:
            return
        while self.in_use and self.in_use[0][0] <= position:
            self.held -= heapq.heappop(self.in_use)[1]
        while self.started < len(self.needed) and self.nbytes[self.started] <= self.limit - self.held:
            self._start()

    def _start(self) -> None:
        self.queue.append(self.started)
        self.held += self.nbytes[self.started]
        heapq.heappush(self.in_use, (self.done[self.started], self.nbytes[self.started]))
        self.started += 1

    def next_load(self, now: float) -> float | None:
        """Begin the next queued load if none runs: when it will end."""
        if self.loading or not self.queue:
            return None
        self.loading = True
        return now + self.load_s[self.queue[0]]

    def load_ended(self) -> None:
        """The running load has ended."""
        self.queue.popleft()
        self.loading = False
        self.loaded += 1

    def switched(self) -> None:
        """The next one is needed."""
        self.using += 1


def group_idle(trainers: list[Trainer], end: float) -> tuple[float, float]:
    """Run trainers that step together to a position: seconds idle, and seconds after start-up.

    Two kinds of events: those at a position (a part is used up), which come only while nobody waits, and ends of
    loads, which come by the clock.
    """
    number = itertools.count()
    by_position: list[tuple[float, int, Trainer]] = []
    by_clock: list[tuple[float, int, Trainer]] = []
    now = position = 0.0
    idle = 0.0
    began: float | None = None
    waiting = 0

    def settle(trainer: Trainer) -> None:
        trainer.start_due(position)
        ends = trainer.next_load(now)
        if ends is not None:
            heapq.heappush(by_clock, (ends, next(number), trainer))

    def turn(trainer: Trainer) -> None:
        switch = trainer.next_switch()
        if switch is not None:
            heapq.heappush(by_position, (switch, next(number), trainer))

    for trainer in trainers:
        waiting += trainer.waits
        turn(trainer)
        settle(trainer)
    while position < end:
        until = min(by_position[0][0], end) if by_position else end
        if not waiting and (not by_clock or now + until - position <= by_clock[0][0]):
            now += until - position
            position = until
            if position >= end:
                break
            _, _, trainer = heapq.heappop(by_position)
            waited = trainer.waits
            trainer.switched()
            waiting += trainer.waits - waited
            turn(trainer)
        else:
            at, _, trainer = heapq.heappop(by_clock)
            if waiting:
                idle += at - now if began is not None else 0.0
            else:
                position += at - now
            now = at
            waited = trainer.waits
            trainer.load_ended()
            waiting += trainer.waits - waited
            if began is None and not waiting:
                began = now
        settle(trainer)
    return idle, now - (began or 0.0)


def idle_ratio(scene: Scene) -> float:
    """Idle share of all trainers' time after start-up."""
    trainers, end = (of_lanes if scene.lanes else of_parts)(scene)
    groups = [trainers] if scene.barrier else [[trainer] for trainer in trainers]
    results = [group_idle(group, end) for group in groups]
    return sum(idle for idle, _ in results) / sum(total for _, total in results)


def draws(scene: Scene, number: int, samples: int) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Sizes in samples around a mean, and factors of load times around one."""
    rng = np.random.default_rng(5)
    weight = rng.uniform(1 - scene.spread, 1 + scene.spread, number)
    noise = np.exp(rng.normal(0, scene.jitter, number) - scene.jitter**2 / 2)
    return np.round(weight * samples).astype(np.int64), noise


def of_parts(scene: Scene) -> tuple[list[Trainer], float]:
    """Trainers that read whole parts as ``PartOrder`` deals them, and where they end."""
    samples, noise = draws(scene, scene.parts, SAMPLES)
    order = PartOrder(tail="drop")
    end = order.length(samples, scene.trainers, seed=7) * scene.train_s / SAMPLES
    trainers = []
    for rank in range(scene.trainers):
        parts = order.parts(scene.parts, 7, 0, rank, scene.trainers)
        share = samples[parts] / SAMPLES
        ends = np.cumsum(share * scene.train_s)
        limit = scene.held * PART_BYTES * (1 + scene.spread)
        loads = share * scene.load_s * noise[parts]
        trainers.append(Trainer(scene, np.append(0.0, ends[:-1]), ends, share * PART_BYTES, loads, limit))
    return trainers, end


def of_lanes(scene: Scene) -> tuple[list[Trainer], float]:
    """Trainers that read blocks as ``LaneOrder`` lays them, some lanes at once, and where they end.

    The blocks of the first 256 steps are start-up, as a reader counts them. ``parts`` counts the blocks here.
    """
    per_block = SAMPLES // BLOCKS_PER_PART
    samples, noise = draws(scene, scene.parts, per_block)
    order = LaneOrder(lanes=scene.lanes * scene.trainers, tail="drop")
    step_s = scene.train_s / SAMPLES
    end = order.length(samples, scene.trainers) * step_s
    block_bytes = PART_BYTES / BLOCKS_PER_PART
    trainers = []
    for rank in range(scene.trainers):
        read = np.searchsorted(
            np.cumsum(samples), order.indices(samples, 7, 0, rank, scene.trainers), side="right"
        )
        step = np.argsort(read, kind="stable")
        # A lane comes back to its first block at its end: that is another use.
        begins = (np.diff(read[step], prepend=-1) != 0) | (np.diff(step, prepend=0) > OPENING)
        ends = np.append(begins[1:], True)
        by_use = np.argsort(step[begins], kind="stable")
        first, last, block = (array[by_use] for array in (step[begins], step[ends], read[step[begins]]))
        share = samples[block] / per_block
        trainers.append(
            Trainer(
                scene,
                np.where(first < OPENING, 0.0, first * step_s),
                (last + 1) * step_s,
                share * block_bytes,
                share * scene.load_s / BLOCKS_PER_PART * noise[block],
                2 * scene.lanes * block_bytes * (1 + scene.spread),
            )
        )
    return trainers, end


def theory(scene: Scene) -> float:
    """The idle share without preloading, all switches of a cycle unaligned."""
    switches = scene.trainers if scene.barrier else 1
    return switches * scene.load_s / (scene.train_s + switches * scene.load_s)
