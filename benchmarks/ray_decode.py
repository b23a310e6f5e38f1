"""Decoding photographs in Ray: a stage of actors against Ray Data, with the memory of both.

Claim: at least 1.2 times the batches per second of ``iter_torch_batches`` at the same cores and the same function.

    python benchmarks/ray_decode.py --images FOLDER     # make test-ray makes an environment with Ray

Both read, decode and resize the same files in as many workers of one CPU each and deliver batches of float-free
uint8 tensors in order. Each has a cluster of its own, with as many CPUs as there are workers: Ray Data's tasks go on
for a while when nobody reads any more. Memory is the proportional set size of this process and all it has started,
looked at after the timed span, without what the cluster takes alone.

What the function costs by itself is nearly all there is, whoever calls it: the limit is bare actors that send nothing.
"""

from __future__ import annotations

import gc
import json
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import harness
from harness import Contestant
from images import BATCH, SIZE, add_images_option, load, one_thread_each, photographs
from memory_peak import resident_mb
from ray_cluster import connected

ACTORS = 2
LIMIT = "limit: bare actors that send nothing"
OURS = "pipegraph, Ray actors"
TASKS = "Ray Data, iter_torch_batches, tasks"
POOL = "Ray Data, iter_torch_batches, actors"
PASSES = 40
WARM, TIMED = 6, 30


def work(path: str) -> dict[str, Any]:
    """One image."""
    one_thread_each()
    return {"image": load(path)}


def cluster() -> AbstractContextManager[None]:
    """Of a contestant's own."""
    return connected(ACTORS, object_store_memory=600_000_000)


@contextmanager
def limit(paths: list[str]) -> Iterator[Iterable[Any]]:
    """The function in as many actors, batch by batch, without its results."""
    import ray

    class Worker:
        def work(self, paths: list[str]) -> None:
            for path in paths:
                work(path)

    def run() -> Iterator[Any]:
        waiting: deque[Any] = deque()
        for number in range(PASSES * len(paths)):
            start = number * BATCH % len(paths)
            waiting.append(actors[number % ACTORS].work.remote((paths * 2)[start : start + BATCH]))
            if len(waiting) > 2 * ACTORS:
                yield ray.get(waiting.popleft())

    with cluster():
        actors = [ray.remote(num_cpus=1)(Worker).remote() for _ in range(ACTORS)]
        yield run()


@contextmanager
def ours(paths: list[str]) -> Iterator[Iterable[Any]]:
    """Decoding in actors, batches put together by the trainer."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("decode")
    files = graph.add(ops.FromSequence(paths * PASSES))
    decoded = files.then(ops.Map(work), name="decode", workers=ACTORS, backend="ray")
    decoded.then(ops.Batch(BATCH))
    with cluster(), graph.loader() as loader:
        yield loader


class Work:
    """``work`` as Ray Data's actors take it."""

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return work(row["path"])


@contextmanager
def ray_data(paths: list[str], actors: bool) -> Iterator[Iterable[Any]]:
    """Ray Data with the same function."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    with cluster():
        rows = ray.data.from_items(
            [{"path": path} for path in paths * PASSES], override_num_blocks=len(paths) * PASSES // BATCH
        )
        if actors:
            decoded = rows.map(Work, compute=ray.data.ActorPoolStrategy(size=ACTORS), num_cpus=1)
        else:
            decoded = rows.map(lambda row: work(row["path"]), num_cpus=1)
        stream = iter(decoded.iter_torch_batches(batch_size=BATCH, prefetch_batches=2))
        yield stream
        stream.close()
        gc.collect()


def check(contestant: Contestant) -> str:
    """Shape and dtype of the first batch."""
    if contestant.name == LIMIT:
        return "nothing"
    with contestant.stream() as stream:
        image = next(iter(stream))["image"]
    if tuple(image.shape) != (BATCH, SIZE, SIZE, 3) or str(image.dtype) != "torch.uint8":
        raise ValueError(f"{tuple(image.shape)} {image.dtype}")
    return "uint8 images"


def added_mb(contestant: Contestant, alone_mb: float) -> float:
    """What a contestant adds to the memory of the cluster alone, in the middle of its work, in MB."""
    with contestant.stream() as stream:
        for _ in islice(stream, WARM + TIMED):
            pass
        return round(resident_mb()[1] - alone_mb, 1)


def main() -> None:
    parser = harness.arguments(__doc__ or "", rounds=2)
    add_images_option(parser)
    options = parser.parse_args()
    paths = photographs(options.images)
    one_thread_each()
    with cluster():
        alone_mb = resident_mb()[1]
    contestants = [
        Contestant(TASKS, partial(ray_data, paths, False), WARM, TIMED),
        Contestant(POOL, partial(ray_data, paths, True), WARM, TIMED),
        Contestant(OURS, partial(ours, paths), WARM, TIMED),
        Contestant(LIMIT, partial(limit, paths), WARM, TIMED),
    ]
    configuration = {"actors": ACTORS, "batch": BATCH, "size": SIZE, "images": len(paths)}
    harness.compare(
        "ray_decode",
        f"decode in {ACTORS} workers of Ray: >= 1.2 of iter_torch_batches, memory beside",
        configuration,
        contestants,
        check,
        [TASKS, POOL],
        "batches",
        options,
    )
    shown = harness.chosen(contestants[:3], options.only)
    added = {each.name: added_mb(each, alone_mb) for each in shown}
    print("added memory, MB:", json.dumps(added))
    if not options.no_record:
        rows = {name: {"added_mb": harness.spread([mb]).to_dict()} for name, mb in added.items()}
        claim = "memory that each adds to the cluster alone while it works"
        harness.record("ray_decode_memory", claim, configuration, {"contestants": rows, "missing": {}})


if __name__ == "__main__":
    main()
