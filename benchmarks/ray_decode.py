"""Decoding photographs in Ray: a stage of actors against Ray Data, with the memory of both.

Claim: at least 1.2 times the batches per second of ``iter_torch_batches`` at the same cores and the same function.

    python benchmarks/ray_decode.py --images FOLDER --rounds 5     # make test-ray makes an environment with Ray

Both read, decode and resize the same files in as many workers of one CPU each and deliver batches of float-free
uint8 tensors in order. Memory is the proportional set size of this process and all it has started, looked at after the
timed span, without what the cluster takes alone.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import harness
from harness import Contestant
from images import BATCH, SIZE, add_images_option, load, one_thread_each, photographs
from memory_peak import resident_mb
from ray_cluster import connected

ACTORS = 2
OURS = "pipegraph, Ray actors"
TASKS = "Ray Data, iter_torch_batches, tasks"
POOL = "Ray Data, iter_torch_batches, actors"
PASSES = 200
WARM, TIMED = 16, 40


def work(path: str) -> dict[str, Any]:
    """One image."""
    one_thread_each()
    return {"image": load(path)}


@contextmanager
def ours(paths: list[str]) -> Iterator[Iterable[Any]]:
    """Decoding in actors, batches put together by the trainer."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("decode")
    files = graph.add(ops.FromSequence(paths * PASSES))
    decoded = files.then(ops.Map(work), name="decode", workers=ACTORS, backend="ray")
    decoded.then(ops.Batch(BATCH))
    with graph.loader() as loader:
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
    rows = ray.data.from_items(
        [{"path": path} for path in paths * PASSES], override_num_blocks=len(paths) * PASSES // BATCH
    )
    if actors:
        decoded = rows.map(Work, compute=ray.data.ActorPoolStrategy(size=ACTORS), num_cpus=1)
    else:
        decoded = rows.map(lambda row: work(row["path"]), num_cpus=1)
    stream = iter(decoded.iter_torch_batches(batch_size=BATCH, prefetch_batches=2))
    try:
        yield stream
    finally:
        del stream
        gc.collect()


def check(contestant: Contestant) -> str:
    """Shape and dtype of the first batch."""
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
    parser = harness.arguments(__doc__ or "")
    add_images_option(parser)
    options = parser.parse_args()
    paths = photographs(options.images)
    one_thread_each()
    with connected(ACTORS + 1, object_store_memory=600_000_000):
        alone_mb = resident_mb()[1]
        contestants = [
            Contestant(TASKS, partial(ray_data, paths, False), WARM, TIMED),
            Contestant(POOL, partial(ray_data, paths, True), WARM, TIMED),
            Contestant(OURS, partial(ours, paths), WARM, TIMED),
        ]
        harness.compare(
            "ray_decode",
            f"decode in {ACTORS} workers of Ray: >= 1.2 of iter_torch_batches, memory beside",
            {"actors": ACTORS, "batch": BATCH, "size": SIZE, "images": len(paths)},
            contestants,
            check,
            [TASKS, POOL],
            "batches",
            options,
        )
        print("added memory, MB:", json.dumps({each.name: added_mb(each, alone_mb) for each in contestants}))


if __name__ == "__main__":
    main()
