"""How long trainers wait for parts, with and without preloading: a simulation.

Claim: without preloading a trainer idles T_load / (T_load + T_train) of the time, and with a collective in
every step, where one that waits stops all, about s T_load / (T_train + s T_load) for s unaligned part
switches per cycle. Preloading takes it below 1 % while T_load < 0.9 T_train.

The clock is virtual; the planner (``PartOrder``: which trainer reads which parts in which order) and the
preloading policy (``pipegraph.storage.preload``) are the real ones. Each trainer loads one part at a time
at its own rate, holds at most ``--held`` parts (the one in use included), and trains on a part in the time
that its samples take. Parts differ in size by up to a tenth; load times are lognormal around bytes over
rate (``--jitter`` is the sigma; the second table has three). The first part's load is start-up, not
idling. All trainers end when the one with the least data does (``tail="drop"``).

    python benchmarks/idle_ratio.py
    python benchmarks/plot_idle_ratio.py
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import deque

import harness
import numpy as np
import numpy.typing as npt

from pipegraph.order import PartOrder
from pipegraph.storage.preload import Durations, preload

PARTS, PART_BYTES, SAMPLES = 16_000, 16 * 10**9, 156_250
TRAIN_S = 6 * 3_600.0
CLAIM = "idle ratio at part switches: near theory without preloading, below 1 % with it while T_load < 0.9 T_train"

FloatArray = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Scene:
    """One simulation: all times in seconds, rates in bytes per second and trainer."""

    trainers: int
    rate: float
    train_s: float
    barrier: bool
    preloading: bool
    jitter: float
    held: int
    spread: float = 0.1
    parts: int = PARTS

    @property
    def load_s(self) -> float:
        """T_load, the mean."""
        return PART_BYTES / self.rate


class Trainer:
    """One trainer's parts: which is in use, which are loaded, loading, or yet to be started.

    Its position is in seconds of training done; loading goes by the clock.
    """

    def __init__(self, scene: Scene, train_s: FloatArray, nbytes: list[int], load_s: FloatArray) -> None:
        self.scene = scene
        self.train_s, self.nbytes, self.load_s = train_s.tolist(), nbytes, load_s.tolist()
        self.ends = np.cumsum(train_s).tolist()
        self.loads, self.trained = Durations(), Durations()
        self.using = 0  # its part number; train_s[using] may not be loaded yet
        self.loaded = 0  # parts loaded so far, in order
        self.started = 0  # parts whose loading was asked for
        self.queue: deque[tuple[int, float]] = deque()  # (part, when asked for)
        self.loading = False
        self.asked = 0  # how often the policy was asked: only its last answer counts

    @property
    def waits(self) -> bool:
        """Whether the part that is to be used next is not there."""
        return self.loaded <= self.using < len(self.ends)

    def ask(self, now: float, position: float) -> float | None:
        """Let the policy start what is due; the position at which to ask again, if it says so."""
        self.asked += 1
        if not self.scene.preloading:
            if self.started <= self.using < len(self.ends):
                self._start(1, now)
            return None
        ahead = self.started - self.using - 1
        held = sum(self.nbytes[self.using : self.started])
        limit = self.scene.held * PART_BYTES * (1 + self.scene.spread)
        decision = preload(
            remaining_s=self.ends[self.using] - position,
            train_s=self.trained.mean,
            lead_s=self.loads.lead,
            ahead=max(ahead, 0),
            upcoming=self.nbytes[self.started : self.started + self.scene.held + 1],
            free_bytes=int(limit) - held,
        )
        # The part in use comes first, whatever the policy thinks of those behind it.
        self._start(max(decision.start, 1 if ahead < 0 else 0), now)
        return None if decision.due_s is None else position + decision.due_s

    def _start(self, parts: int, now: float) -> None:
        for part in range(self.started, min(self.started + parts, len(self.ends))):
            self.queue.append((part, now))
            self.started += 1

    def next_load(self, now: float) -> float | None:
        """Begin the next queued load if none runs: when it will end."""
        if self.loading or not self.queue:
            return None
        self.loading = True
        return now + self.load_s[self.queue[0][0]]

    def load_ended(self, now: float) -> None:
        """The running load has ended."""
        _, asked = self.queue.popleft()
        self.loads.add(now - asked)
        self.loading = False
        self.loaded += 1

    def switched(self) -> None:
        """The part in use is used up."""
        self.trained.add(self.train_s[self.using])
        self.using += 1


def group_idle(trainers: list[Trainer], end: float) -> tuple[float, float]:
    """Run trainers that step together to a position: seconds idle, and seconds after start-up.

    Two kinds of events: those at a position (a part is used up, the policy wants to be asked), which
    come only while nobody waits, and ends of loads, which come by the clock.
    """
    number = itertools.count()
    # The last number is that of the policy's answer that names the position; 0 is a part used up.
    by_position: list[tuple[float, int, Trainer, int]] = []
    by_clock: list[tuple[float, int, Trainer]] = []
    now = position = 0.0
    idle = 0.0
    began: float | None = None
    waiting = 0

    def settle(trainer: Trainer) -> None:
        due = trainer.ask(now, position)
        if due is not None:
            heapq.heappush(by_position, (due, next(number), trainer, trainer.asked))
        ends = trainer.next_load(now)
        if ends is not None:
            heapq.heappush(by_clock, (ends, next(number), trainer))

    for trainer in trainers:
        waiting += trainer.waits
        heapq.heappush(by_position, (trainer.ends[0], next(number), trainer, 0))
        settle(trainer)
    while position < end:
        until = min(by_position[0][0], end) if by_position else end
        if not waiting and (not by_clock or now + until - position <= by_clock[0][0]):
            now += until - position
            position = until
            if position >= end:
                break
            _, _, trainer, answer = heapq.heappop(by_position)
            if answer not in (0, trainer.asked):
                continue
            if not answer:
                waited = trainer.waits
                trainer.switched()
                waiting += trainer.waits - waited
                if trainer.using < len(trainer.ends):
                    heapq.heappush(by_position, (trainer.ends[trainer.using], next(number), trainer, 0))
        else:
            at, _, trainer = heapq.heappop(by_clock)
            if waiting:
                idle += at - now if began is not None else 0.0
            else:
                position += at - now
            now = at
            waited = trainer.waits
            trainer.load_ended(now)
            waiting += trainer.waits - waited
            if began is None and not waiting:
                began = now
        if trainer.using < len(trainer.ends):
            settle(trainer)
    return idle, now - (began or 0.0)


def idle_ratio(scene: Scene) -> float:
    """Idle share of all trainers' time after start-up."""
    rng = np.random.default_rng(5)
    weight = rng.uniform(1 - scene.spread, 1 + scene.spread, scene.parts)
    samples = np.round(weight * SAMPLES).astype(np.int64)
    noise = np.exp(rng.normal(0, scene.jitter, scene.parts) - scene.jitter**2 / 2)
    order = PartOrder(tail="drop")
    steps = order.length(samples, scene.trainers, seed=7)
    end = steps * scene.train_s / SAMPLES
    trainers = []
    for rank in range(scene.trainers):
        parts = order.parts(scene.parts, 7, 0, rank, scene.trainers)
        share = samples[parts] / SAMPLES
        nbytes = (share * PART_BYTES).astype(np.int64).tolist()
        trainers.append(Trainer(scene, share * scene.train_s, nbytes, share * scene.load_s * noise[parts]))
    groups = [trainers] if scene.barrier else [[trainer] for trainer in trainers]
    results = [group_idle(group, end) for group in groups]
    return sum(idle for idle, _ in results) / sum(total for _, total in results)


def theory(scene: Scene) -> float:
    """The idle share without preloading, all switches of a cycle unaligned."""
    switches = scene.trainers if scene.barrier else 1
    return switches * scene.load_s / (scene.train_s + switches * scene.load_s)


def main() -> None:
    parser = harness.arguments(__doc__ or "", rounds=1)
    parser.add_argument(
        "--jitter", type=float, default=0.1, help="sigma of lognormal load times (default 0.1)"
    )
    parser.add_argument("--held", type=int, default=4, help="parts a trainer may hold (default 4)")
    parser.add_argument("--parts", type=int, default=PARTS, help=f"parts in the data set (default {PARTS})")
    options = parser.parse_args()
    shared = {"jitter": options.jitter, "held": options.held, "parts": options.parts}
    configuration = shared | {"part_gb": PART_BYTES / 1e9, "train_hours": TRAIN_S / 3_600}
    harness.header(CLAIM, configuration)
    rows = [
        run(Scene(trainers, rate, TRAIN_S, barrier, False, **shared))
        for trainers in (16, 64, 256, 1_024, 4_096)
        for rate in (10e6, 30e6, 100e6, 300e6, 1e9)
        for barrier in (False, True)
    ]
    # The same with loads that take nearly as long as training, or longer.
    near = [
        run(Scene(16, 100e6, PART_BYTES / 100e6 / ratio, barrier, False, **(shared | {"jitter": jitter})))
        for ratio in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.2, 1.5)
        for jitter in (0.0, 0.1, 0.3)
        for barrier in (False, True)
    ]
    columns = (
        "trainers",
        "MB/s",
        "T_load/T_train",
        "jitter",
        "barrier",
        "theory",
        "without",
        "with preloading",
    )
    for found in (rows, near):
        print(harness.table(columns, (line(row) for row in found)))
    if not options.no_record:
        print(harness.record("idle_ratio", CLAIM, configuration, {"grid": rows, "near": near}))


def run(scene: Scene) -> dict[str, float | bool]:
    """Both simulations of a scene, and the theory."""
    return {
        "trainers": scene.trainers,
        "rate_mb_s": scene.rate / 1e6,
        "load_over_train": round(scene.load_s / scene.train_s, 5),
        "jitter": scene.jitter,
        "barrier": scene.barrier,
        "theory": theory(scene),
        "without": idle_ratio(scene),
        "with": idle_ratio(dataclasses.replace(scene, preloading=True)),
    }


def line(row: dict[str, float | bool]) -> list[str]:
    """A row of the printed table."""
    return [
        f"{row['trainers']:,}",
        f"{row['rate_mb_s']:g}",
        f"{row['load_over_train']:.4g}",
        f"{row['jitter']:g}",
        "yes" if row["barrier"] else "no",
        *(f"{100 * row[name]:.2f} %" for name in ("theory", "without", "with")),
    ]


if __name__ == "__main__":
    main()
