"""How long trainers wait for parts, with and without preloading: a simulation.

Claim: without preloading a trainer idles T_load / (T_load + T_train) of the time, and with a collective in
every step, where one that waits stops all, about s T_load / (T_train + s T_load) for s unaligned part
switches per cycle. Preloading takes it below 1 % while T_load < 0.9 T_train.

The clock is virtual; the planners (``PartOrder``: which trainer reads which parts in which order; ``LaneOrder``: when
it reads which blocks of 128 MB, in 15 lanes at once) are the real ones, and as a ``BlockReader`` does, trainers read
ahead as far as there is room. Each trainer loads one part or block at a time at its own rate, holds at most
``--held`` parts (the one in use included) or two blocks for each lane, and trains on a part in the time that its
samples take. Parts and blocks differ in size by up to a tenth; load times are lognormal around bytes over rate
(``--jitter`` is the sigma; the tables of loads near training have three). The first part's load, and those of the
blocks of the first 256 steps, are start-up, not idling. Of lanes a shorter epoch is simulated: as many blocks for each
trainer as the tables say. All trainers end when the one with the least data does (``tail="drop"``).

    python benchmarks/idle_ratio.py
    python benchmarks/plot_idle_ratio.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import harness
from idle_simulation import LANES, PART_BYTES, PARTS, TRAIN_S, Scene, idle_ratio, theory

CLAIM = "idle ratio at part switches: near theory without preloading, below 1 % with it while T_load < 0.9 T_train"

NEAR = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.2, 1.5)
"""T_load over T_train, of loads that take nearly as long as training, or longer."""

RATES = (10e6, 30e6, 100e6, 300e6, 1e9)

Row = dict[str, float | bool | str]
Shared = dict[str, Any]


def parts_tables(shared: Shared) -> dict[str, list[Row]]:
    """``PartOrder``, 16,000 parts."""
    grid = [
        run(Scene(trainers, rate, TRAIN_S, barrier, False, **shared))
        for trainers in (16, 64, 256, 1_024, 4_096)
        for rate in RATES
        for barrier in (False, True)
    ]
    near = [
        run(Scene(16, 100e6, PART_BYTES / 100e6 / ratio, barrier, False, **(shared | {"jitter": jitter})))
        for ratio in NEAR
        for jitter in (0.0, 0.1, 0.3)
        for barrier in (False, True)
    ]
    return {"grid": grid, "near": near}


def lanes_tables(shared: Shared) -> dict[str, list[Row]]:
    """``LaneOrder`` with 15 lanes for each trainer, a barrier in every step."""

    def scene(trainers: int, blocks: int, rate: float, train_s: float, jitter: float) -> Scene:
        changed = shared | {"parts": trainers * blocks, "jitter": jitter}
        return Scene(trainers, rate, train_s, True, False, **changed, lanes=LANES)

    sizes = [(16, 600, RATES), (64, 200, RATES), (256, 100, RATES)]

    grid = [
        run(scene(trainers, blocks, rate, TRAIN_S, shared["jitter"]))
        for trainers, blocks, rates in sizes
        for rate in rates
    ]
    near = [
        run(scene(16, 600, 100e6, PART_BYTES / 100e6 / ratio, jitter))
        for ratio in NEAR
        for jitter in (0.0, 0.1, 0.3)
    ]
    return {"lanes": grid, "near_lanes": near}


def main() -> None:
    parser = harness.arguments(__doc__ or "", rounds=1)
    parser.add_argument(
        "--jitter", type=float, default=0.1, help="sigma of lognormal load times (default 0.1)"
    )
    parser.add_argument("--held", type=int, default=4, help="parts a trainer may hold (default 4)")
    parser.add_argument("--parts", type=int, default=PARTS, help=f"parts in the dataset (default {PARTS})")
    parser.add_argument("--orders", nargs="+", choices=["parts", "lanes"], default=["parts", "lanes"])
    options = parser.parse_args()
    shared = {"jitter": options.jitter, "held": options.held, "parts": options.parts}
    configuration = shared | {"part_gb": PART_BYTES / 1e9, "train_hours": TRAIN_S / 3_600}
    harness.header(CLAIM, configuration)
    made = {"parts": parts_tables, "lanes": lanes_tables}
    results = {name: rows for order in options.orders for name, rows in made[order](shared).items()}
    columns = (
        "order",
        "trainers",
        "MB/s",
        "T_load/T_train",
        "jitter",
        "barrier",
        "theory",
        "without",
        "with preloading",
    )
    for found in results.values():
        print(harness.table(columns, (line(row) for row in found)))
    if not options.no_record:
        print(harness.record("idle_ratio", CLAIM, configuration, results))


def run(scene: Scene) -> Row:
    """Both simulations of a scene, and the theory."""
    return {
        "order": "LaneOrder" if scene.lanes else "PartOrder",
        "switches_per_trainer": round(scene.parts / scene.trainers),
        "trainers": scene.trainers,
        "rate_mb_s": scene.rate / 1e6,
        "load_over_train": round(scene.load_s / scene.train_s, 5),
        "jitter": scene.jitter,
        "barrier": scene.barrier,
        "theory": theory(scene),
        "without": idle_ratio(scene),
        "with": idle_ratio(dataclasses.replace(scene, preloading=True)),
    }


def line(row: Row) -> list[str]:
    """A row of the printed table."""
    return [
        f"{row['order']} ({row['switches_per_trainer']} each)",
        f"{row['trainers']:,}",
        f"{row['rate_mb_s']:g}",
        f"{row['load_over_train']:.4g}",
        f"{row['jitter']:g}",
        "yes" if row["barrier"] else "no",
        *(f"{100 * float(row[name]):.2f} %" for name in ("theory", "without", "with")),
    ]


if __name__ == "__main__":
    main()
