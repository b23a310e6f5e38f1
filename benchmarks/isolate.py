"""What a loader takes from the training loop: a loop of many tiny operations, which is Python work itself.

Claim: with ``isolate=True`` the loop keeps at least 0.95 of its speed without any loader.

    python benchmarks/isolate.py --rounds 40

A step is some hundred small tensor operations and takes its batch; to make a batch takes about 0.6 of a step, most of
it in Python, which holds the GIL. So one worker is always ahead, and what the loop loses it loses to the
lock, to wake-ups and to what the loader itself does in its thread.

All loaders are open at once and stand still but for one; the loop runs for some tens of steps with each in turn, and
without one before and after. So each ratio is of neighbours in time, and a busy machine spreads the ratios and moves
their median little. The hand-written process shows what the machine's cores allow.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import harness
from images import one_thread_each
from python_transform import Transform, calibrated

CLAIM = "a loop of tiny operations keeps >= 0.95 of its speed with isolate=True"
OURS, BY_HAND = "pipegraph, isolate", "hand-written process"
BATCH = 16
OPERATIONS = 500
SHARE = 0.6
PREFETCH = 4
ENDLESS = 1 << 30
WARM, TIMED = 12, 40
"""Steps of a stretch: more than are ready beforehand, and those that count."""


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
def by_hand(work: Transform) -> Iterator[Any]:
    """Hand-written: one process, whose batches come as bytes over a pipe that holds several. What two cores allow."""
    import torch

    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(ours)
        for start in range(0, ENDLESS, BATCH):
            rows = torch.stack([work(index) for index in range(start, start + BATCH)])
            data = memoryview(rows.numpy()).cast("B")
            while data:
                data = data[os.write(theirs, data) :]
        os._exit(0)
    os.close(theirs)
    first = work.batch(0)[:BATCH]
    with open(ours, "rb") as pipe:

        def batches() -> Iterator[Any]:
            while data := pipe.read(first.nbytes):
                yield torch.frombuffer(bytearray(data), dtype=first.dtype).view(first.shape)

        yield trained(batches())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


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


STREAMS: dict[str, Callable[[Transform], AbstractContextManager[Any]]] = {
    # By fork: before there are threads.
    BY_HAND: by_hand,
    "DataLoader, processes": dataloader,
    OURS: partial(pipegraph, isolate=True),
    "pipegraph, processes": partial(pipegraph, backend="process"),
    "pipegraph, threads": pipegraph,
}


def seconds(steps: Iterator[Any]) -> float:
    """For one step, in a stretch of them, once what was ready beforehand is used up."""
    for _ in range(WARM):
        next(steps)
    start = time.perf_counter()
    for _ in range(TIMED):
        next(steps)
    return (time.perf_counter() - start) / TIMED


def measured(work: Transform, names: list[str], rounds: int) -> dict[str, list[float]]:
    """The loop's speed with each loader over its speed without one, once a round.

    Raises:
        RuntimeError: a loader's first step is not that of the first batch.
    """
    import torch

    found: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as open_loaders:
        streams = {name: open_loaders.enter_context(STREAMS[name](work)) for name in names}
        plain = open_loaders.enter_context(alone(work))
        wanted = step(work.batch(0)[:BATCH])
        for name, stream in streams.items():
            if not torch.equal(next(stream), wanted):
                raise RuntimeError(f"{name}: another batch")
        for number in range(rounds + 1):
            before = seconds(plain)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                with_loader = seconds(streams[name])
                after = seconds(plain)
                if number:  # the first round warms up
                    found[name].append((before + after) / 2 / with_loader)
                before = after
    return found


def main() -> None:
    parser = harness.arguments(__doc__ or "", rounds=40)
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
        "rounds": options.rounds, "steps": TIMED,
    }  # fmt: skip
    harness.header(CLAIM, configuration)
    names = [name for name in STREAMS if options.only in name]
    ratios = measured(work, names, options.rounds)
    rows, results = [], {}
    for name, each in ratios.items():
        low, middle, high = statistics.quantiles(each, n=4)
        spread = harness.spread(each)
        results[name] = {**spread.to_dict(), "quartiles": [round(low, 4), round(middle, 4), round(high, 4)]}
        rows.append([name, f"{middle:.3f}", f"{low:.3f}-{high:.3f}", f"{spread.low:.3f}-{spread.high:.3f}"])
    print(harness.table(["", "speed over no loader, median", "quartiles", "range"], rows))
    if not options.no_record:
        print("recorded in", harness.record("isolate", CLAIM, configuration, results).name)


if __name__ == "__main__":
    main()
