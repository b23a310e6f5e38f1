"""What a loader takes from the training loop: a loop of many tiny operations, which is Python work itself.

Claim: with ``isolate=True`` the loop keeps at least 0.95 of its speed without any loader.

    python benchmarks/isolate.py --rounds 5

A step is some hundred small tensor operations and takes its batch; to make a batch takes about 0.6 of a step, most of
it in Python, which holds the interpreter lock. So one worker is always ahead, and what the loop loses it loses to the
lock, to wake-ups and to what the loader itself does in its thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import harness
from harness import Contestant
from images import one_thread_each
from python_transform import Transform, calibrated

CLAIM = "a loop of tiny operations keeps >= 0.95 of its speed with isolate=True"
ALONE, OURS = "no loader", "pipegraph, isolate"
BATCH = 16
OPERATIONS = 500
SHARE = 0.6
PREFETCH = 4
ENDLESS = 1 << 30


def step(batch: Any) -> Any:
    """As a model of many small layers behaves on a fast device: Python and dispatch, hardly any arithmetic."""
    x = batch[0].float()
    for _ in range(OPERATIONS):
        x = x * 0.5 + 1.0
    return x


def trained(batches: Iterable[Any]) -> Iterator[Any]:
    """The training loop, a step at a time."""
    for batch in batches:
        yield step(batch)


@contextmanager
def alone(work: Transform) -> Iterator[Any]:
    """The same batch again and again."""
    batch = work.batch(0)[:BATCH]
    yield trained(batch for _ in range(ENDLESS))


@contextmanager
def pipegraph(work: Transform, backend: str = "thread", isolate: bool = False) -> Iterator[Any]:
    """One worker."""
    import pipegraph as pg
    from pipegraph import operators as ops

    graph = pg.Graph("isolate")
    rows = graph.add(ops.FromIterable(range(ENDLESS))).then(work, name="work", backend=backend)
    rows.then(ops.Batch(BATCH), capacity=PREFETCH)
    with graph.loader(isolate=isolate) as loader:
        yield trained(loader)


@contextmanager
def dataloader(work: Transform) -> Iterator[Any]:
    """One process."""
    from torch.utils.data import DataLoader

    data: Any = work
    loader: Any = DataLoader(
        data, batch_size=BATCH, num_workers=1, prefetch_factor=PREFETCH, persistent_workers=True
    )
    iterator = iter(loader)
    yield trained(iterator)
    iterator._shutdown_workers()


def contestants(work: Transform) -> list[Contestant]:
    """The loop with each loader, and with none."""
    streams: dict[str, Callable[[Transform], AbstractContextManager[Any]]] = {
        ALONE: alone,
        OURS: partial(pipegraph, isolate=True),
        "pipegraph, processes": partial(pipegraph, backend="process"),
        "pipegraph, threads": pipegraph,
        "DataLoader, processes": dataloader,
    }
    return [Contestant(name, partial(s, work), warm=100, timed=500) for name, s in streams.items()]


def check(work: Transform, contestant: Contestant) -> str:
    """The first step's result must be that of the first batch."""
    import torch

    with contestant.stream() as stream:
        if not torch.equal(next(iter(stream)), step(work.batch(0)[:BATCH])):
            raise RuntimeError(f"{contestant.name}: another batch")
    return "equal"


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    options = parser.parse_args()
    one_thread_each()
    batch = Transform(10).batch(0)[:BATCH]
    spent = []
    for _ in range(50):
        start = time.perf_counter()
        step(batch)
        spent.append(time.perf_counter() - start)
    step_ms = 1e3 * min(spent)
    work = calibrated(SHARE * step_ms / BATCH)
    configuration = {
        "step_ms": round(step_ms, 2), "batch_ms": round(SHARE * step_ms, 2), "batch": BATCH, "workers": 1,
        "rounds": options.rounds,
    }  # fmt: skip
    harness.compare(
        "isolate", CLAIM, configuration, contestants(work), partial(check, work), [ALONE], "steps", options
    )


if __name__ == "__main__":
    main()
