"""How a job with stages on Ray scales: simulated from measured times, up to 4,096 trainers and 10,000 actors.

    python benchmarks/ray_scale.py                                  # a table, and a row in results/
    python benchmarks/ray_scale.py --service-ms 60 --step-ms 20 --batch-mb 38 --driver-ms 1.5

Times come from a machine of yours: --service-ms is the profile's time per batch of the Ray stage, --driver-ms what
one batch costs the trainer's process (1,000 over the items/s of ray_calls.py at this batch size), --step-ms a training
step.

Each trainer has actors of its own. A batch goes to the actor that is free first, as long as it is not further ahead of
the trainer than the queue allows; batches are delivered in order; the step of a synchronous job begins when every
trainer has its batch. Service times are lognormal. All trainers advance at once, one array operation per batch.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from records import record

CASES = ((1, 3), (8, 24), (64, 192), (512, 1_536), (2_048, 6_144), (4_096, 10_000), (4_096, 16_384))
"""Trainers and actors."""

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """A synchronous job.

    Attributes:
        service_s: mean time of an actor per batch.
        spread: standard deviation of the service time over its mean.
        driver_s: of the trainer's process per batch, in its data thread.
        way_s: from an answer to the next call's arrival at the actor.
        step_s: a training step.
        ahead: batches per actor that may be finished and not yet taken.
    """

    service_s: float
    spread: float
    driver_s: float
    way_s: float
    step_s: float
    ahead: int


def simulate(job: Job, trainers: int, actors: int, steps: int, seed: int = 0) -> dict[str, float]:
    """Run ``steps`` steps; the first fifth is warm-up.

    Returns:
        Steps per second over those without any wait for data; the share of time that a trainer's data thread is busy.
    """
    numbers = np.random.default_rng(seed)
    each = np.full(trainers, actors // trainers)
    each[: actors % trainers] += 1
    most = int(each.max())
    free: Times = np.where(
        np.arange(most) < each[:, None], 0.0, np.inf
    )  # when each actor of a trainer is free
    sigma = np.sqrt(np.log1p(job.spread**2))
    queue = job.ahead * each
    taken = np.zeros((steps + 1, trainers))  # when the trainer took each batch
    delivered = np.zeros(trainers)
    rows = np.arange(trainers)
    clock = 0.0
    begun = 0.0
    for step in range(steps):
        first = free.argmin(axis=1)
        room = taken[np.maximum(step - queue, 0), rows]
        start = np.maximum(free[rows, first], room)
        service = job.service_s * numbers.lognormal(-(sigma**2) / 2, sigma, trainers)
        done = start + job.way_s + service
        free[rows, first] = done
        delivered = np.maximum(delivered, done) + job.driver_s
        clock = max(clock, float(delivered.max())) + job.step_s  # all wait for the last
        taken[step + 1] = clock - job.step_s
        if step == steps // 5:
            begun = clock
    rate = (steps - 1 - steps // 5) / (clock - begun)
    return {"of_ideal": rate * job.step_s, "driver_busy": rate * job.driver_s}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--service-ms", type=float, default=250.0)
    parser.add_argument("--spread", type=float, default=0.2)
    parser.add_argument("--driver-ms", type=float, default=2.0)
    parser.add_argument("--way-ms", type=float, default=2.0)
    parser.add_argument("--step-ms", type=float, default=120.0)
    parser.add_argument("--batch-mb", type=float, default=9.6)
    parser.add_argument("--ahead", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    job = Job(
        options.service_ms / 1e3,
        options.spread,
        options.driver_ms / 1e3,
        options.way_ms / 1e3,
        options.step_ms / 1e3,
        options.ahead,
    )
    print(f"{job}, batches of {options.batch_mb:g} MB, {options.steps} steps")
    heads = (
        "trainers",
        "actors",
        "each",
        "of ideal",
        "driver busy",
        "calls/s",
        "GB/s per trainer",
        "queued MB each",
    )
    print(" ".join(f"{head:>16}" for head in heads))
    results = []
    for trainers, actors in CASES:
        found = simulate(job, trainers, actors, options.steps)
        rate = found["of_ideal"] / job.step_s
        row = {
            "trainers": trainers,
            "actors": actors,
            "each": actors / trainers,
            **found,
            "calls_per_s": rate * trainers,
            "gb_per_s_each": rate * options.batch_mb / 1e3,
            "queued_mb_each": (job.ahead + 1) * actors / trainers * options.batch_mb,
        }
        results.append(row)
        print(
            " ".join(
                f"{value:>16.3g}" if isinstance(value, float) else f"{value:>16,}" for value in row.values()
            )
        )
    if not options.no_record:
        where = record(
            "ray_scale", "simulated to 4,096 trainers and 10,000 actors", vars(options), {"cases": results}
        )
        print("recorded in", where.name)


if __name__ == "__main__":
    main()
