"""A whole pass over photographs in Ray, start of the actors included: a stage of actors against Ray Data.

Claim: no more seconds than Ray Data from the description to the last batch, in a first pass and in a second one of a
new loader over the same function (evaluation, k-fold). Ray keeps the processes of its tasks for the second; a loader's
actors end with it, so that it holds nothing of the cluster.

    python benchmarks/ray_wall.py --images FOLDER     # make test-ray makes an environment with Ray

Both read, decode and resize the same files in as many workers of one CPU each. Each has a cluster of its own in each
round, whose start is outside the timed span; contestants take turns.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import harness
from images import BATCH, SIZE, add_images_option, load, one_thread_each, photographs

ACTORS = 2
OURS = "pipegraph, Ray actors"
TASKS = "Ray Data, iter_torch_batches, tasks"
POOL = "Ray Data, iter_torch_batches, actors"
TIMES = 4
"""Times that the folder is read in a pass."""


def work(path: str) -> dict[str, Any]:
    """One image."""
    one_thread_each()
    return {"image": load(path)}


class Work:
    """``work`` as Ray Data's actors take it."""

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return work(row["path"])


@contextmanager
def cluster() -> Iterator[None]:
    """A cluster of this machine with as many CPUs as there are workers, and no process that is not needed."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Threads that Ray Data leaves behind would start another cluster.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    import ray

    ray.init(
        address="local",
        num_cpus=ACTORS,
        include_dashboard=False,
        object_store_memory=600_000_000,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
    )
    try:
        yield
    finally:
        ray.shutdown()


def ours(paths: list[str]) -> int:
    """Batches of a loader of its own."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("decode")
    decoded = graph.add(ops.FromSequence(paths)).then(
        ops.Map(work), name="decode", workers=ACTORS, backend="ray"
    )
    decoded.then(ops.Batch(BATCH))
    with graph.loader() as loader:
        return count(loader)


def ray_data(paths: list[str], actors: bool) -> int:
    """Batches of a dataset of its own."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    rows = ray.data.from_items([{"path": path} for path in paths], override_num_blocks=len(paths) // BATCH)
    if actors:
        decoded = rows.map(Work, compute=ray.data.ActorPoolStrategy(size=ACTORS), num_cpus=1)
    else:
        decoded = rows.map(lambda row: work(row["path"]), num_cpus=1)
    return count(decoded.iter_torch_batches(batch_size=BATCH, prefetch_batches=2))


def count(batches: Iterable[Any]) -> int:
    """How many batches there are, of the right kind."""
    number = 0
    for batch in batches:
        number += 1
        if tuple(batch["image"].shape[1:]) != (SIZE, SIZE, 3):
            raise ValueError(f"{tuple(batch['image'].shape)}")
    return number


CONTESTANTS: dict[str, Callable[[list[str]], int]] = {
    TASKS: lambda paths: ray_data(paths, False),
    POOL: lambda paths: ray_data(paths, True),
    OURS: ours,
}


def main() -> None:
    parser = harness.arguments(__doc__ or "", rounds=3)
    add_images_option(parser)
    options = parser.parse_args()
    paths = photographs(options.images) * TIMES
    one_thread_each()
    claim = f"whole passes in {ACTORS} workers of Ray: no slower than Ray Data, the start of actors included"
    configuration = {"actors": ACTORS, "batch": BATCH, "size": SIZE, "images": len(paths)}
    harness.header(claim, configuration)
    names = [name for name in CONTESTANTS if not options.only or options.only in name]
    taken: dict[str, dict[str, list[float]]] = {
        which: {name: [] for name in names} for which in ("first", "second")
    }
    for turn in range(options.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with cluster():
                for walls in taken.values():
                    began = time.perf_counter()
                    if CONTESTANTS[name](paths) != -(-len(paths) // BATCH):
                        raise ValueError(f"{name}: not all batches")
                    walls[name].append(time.perf_counter() - began)
                gc.collect()
    rows, results = [], {}
    for which, walls in taken.items():
        spreads = {name: harness.spread(seconds) for name, seconds in walls.items()}
        results[which] = {name: {"wall_s": each.to_dict()} for name, each in spreads.items()}
        for name, seconds in walls.items():
            of_ours = [theirs / mine for mine, theirs in zip(walls.get(OURS, []), seconds, strict=False)]
            ratio = str(harness.spread(of_ours)) if of_ours else "-"
            rows.append([which, name, str(spreads[name]), ratio])
    print(harness.table(["pass", "", "seconds", "its seconds / ours, by round"], rows))
    if not options.no_record:
        harness.record(
            "ray_wall", claim, configuration | {"rounds": options.rounds}, {"passes": results, "missing": {}}
        )


if __name__ == "__main__":
    main()
