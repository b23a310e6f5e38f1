"""What a stage costs: chains of k trivial map stages, item by item, integers.

Claim: at most 3 us per item and stage (capacity 64, one worker, ordered, statistics on), at least 6 times faster than
torchdata.nodes' thread ParallelMapper, at least 30 times faster than SPDL, flat from 1 to 64 stages.

Every contestant has a queue and a thread per stage, except those marked "no queue": DataLoader and Grain run all maps
in one place. "tuned" rows are what a peer's documentation offers for small items.

    python benchmarks/hop_cost.py --rounds 5
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice, pairwise
from typing import Any

import harness
from harness import Contestant, loaded
from peers import shut_down

CLAIM = "<= 3 us per item and stage; >= 6 x torchdata.nodes (threads); >= 30 x SPDL; flat to 64 stages"
CAPACITY = 64
# More than any contestant draws: the stream is closed while more would come.
ENDLESS = 1 << 40
IDEAL = "bare threads"
OURS = "pipegraph"


def identity(item: int) -> int:
    """The trivial stage: what is left is the framework."""
    return item


class BareChannel:
    """The least a bounded queue can be: one lock, whatever is ready taken at once."""

    def __init__(self) -> None:
        self.items: deque[int] = deque()
        self.lock = threading.Lock()
        self.filled = threading.Condition(self.lock)
        self.drained = threading.Condition(self.lock)
        self.closed = False

    def put_all(self, items: list[int]) -> bool:
        """Put in order, waiting for room; False once closed."""
        done = 0
        while done < len(items):
            with self.lock:
                while len(self.items) >= CAPACITY and not self.closed:
                    self.drained.wait()
                if self.closed:
                    return False
                room = CAPACITY - len(self.items)
                self.items.extend(items[done : done + room])
                done += room
                self.filled.notify()
        return True

    def take_all(self) -> list[int]:
        """All that is there, at least one; nothing once closed."""
        with self.lock:
            while not self.items and not self.closed:
                self.filled.wait()
            items = list(self.items)
            self.items.clear()
            self.drained.notify()
        return [] if self.closed else items

    def close(self) -> None:
        """Wake everyone for good."""
        with self.lock:
            self.closed = True
            self.filled.notify_all()
            self.drained.notify_all()


@contextmanager
def running(source: Any, stage: Any, queues: list[Any]) -> Iterator[None]:
    """A thread for the source, and one for each stage between two queues; they are waited for at the end."""
    threads = [threading.Thread(target=source, daemon=True)]
    threads += [threading.Thread(target=stage, args=pair, daemon=True) for pair in pairwise(queues)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


@contextmanager
def bare(depth: int) -> Iterator[Iterator[int]]:
    """Hand-written: a thread per stage, bounded deques between, no statistics, no error handling."""
    channels = [BareChannel() for _ in range(depth + 1)]

    def source() -> None:
        item = 0
        while channels[0].put_all(list(range(item, item + CAPACITY))):
            item += CAPACITY

    def stage(upstream: BareChannel, downstream: BareChannel) -> None:
        while items := upstream.take_all():
            if not downstream.put_all([identity(item) for item in items]):
                return

    def drain() -> Iterator[int]:
        while items := channels[-1].take_all():
            yield from items

    with running(source, stage, channels):
        yield drain()
        for channel in channels:
            channel.close()


@contextmanager
def plain_queues(depth: int) -> Iterator[Iterator[int]]:
    """Hand-written in the obvious way: ``queue.Queue`` between the threads, one item at a time."""
    queues: list[queue.Queue[int]] = [queue.Queue(CAPACITY) for _ in range(depth + 1)]
    stop = threading.Event()

    def source() -> None:
        item = 0
        while not stop.is_set():
            queues[0].put(item)
            item += 1
        queues[0].put(-1)

    def stage(upstream: queue.Queue[int], downstream: queue.Queue[int]) -> None:
        while (item := upstream.get()) >= 0:
            downstream.put(identity(item))
        downstream.put(-1)

    drain = iter(queues[-1].get, -1)
    with running(source, stage, queues):
        yield drain
        stop.set()
        deque(drain, maxlen=0)


def pipegraph(depth: int, workers: int = 1) -> Any:
    """The chain as a user writes it."""
    import pipegraph as pg
    from pipegraph import operators as ops

    node = pg.Graph("hop").add(ops.FromIterable(range(ENDLESS)), capacity=CAPACITY)
    for _ in range(depth):
        node = node.then(ops.Map(identity), workers=workers, capacity=CAPACITY)
    return loaded(node)


@contextmanager
def torchdata_nodes(depth: int, tuned: bool = False) -> Iterator[Iterator[int]]:
    """A thread ``ParallelMapper`` per stage; tuned: prebatched by 64, a snapshot every 64 batches."""
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

    options: dict[str, Any] = {"prebatch": CAPACITY, "snapshot_frequency": CAPACITY} if tuned else {}
    node: Any = IterableWrapper(range(ENDLESS))
    for _ in range(depth):
        node = ParallelMapper(node, identity, num_workers=1, method="thread", **options)
    iterator = iter(Loader(node))
    yield iterator
    # From the last stage to the first: collected in another order, the threads would continue polling.
    shut_down(iterator)


@contextmanager
def spdl(depth: int) -> Iterator[Iterator[int]]:
    """A ``pipe`` per stage with concurrency 1; as many pool threads as stages, a sink of 64."""
    from spdl.pipeline import PipelineBuilder

    builder: Any = PipelineBuilder()
    builder = builder.add_source(range(ENDLESS))
    for _ in range(depth):
        builder = builder.pipe(identity, concurrency=1, output_order="input")
    pipeline = builder.add_sink(CAPACITY).build(num_threads=depth, use_thread_output_queue=True)
    with pipeline.auto_stop(timeout=120):
        yield iter(pipeline)


@contextmanager
def grain_maps(depth: int) -> Iterator[Iterator[int]]:
    """Grain's usual form: all maps in one read thread, a buffer of 64 behind them (no queue between maps)."""
    import grain

    data = grain.MapDataset.range(ENDLESS)
    for _ in range(depth):
        data = data.map(identity)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=CAPACITY)
    iterator = iter(data.to_iter_dataset(options))
    yield iterator
    iterator.close()


@contextmanager
def grain_queues(depth: int) -> Iterator[Iterator[int]]:
    """Grain with a thread and a queue behind every map."""
    import grain

    data: Any = grain.MapDataset.range(ENDLESS).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )
    for _ in range(depth):
        data = grain.experimental.ThreadPrefetchIterDataset(data.map(identity), prefetch_buffer_size=CAPACITY)
    iterator = iter(data)
    yield iterator
    iterator.close()


@contextmanager
def dataloader(depth: int) -> Iterator[Iterator[int]]:
    """DataLoader, one worker process, ``batch_size=None``: item by item, all maps in the worker."""
    from torch.utils.data import DataLoader

    chain: Any = Chain(depth)
    loader: Any = DataLoader(chain, batch_size=None, num_workers=1, prefetch_factor=CAPACITY)
    iterator = iter(loader)
    yield iterator
    del iterator


class Chain:
    """A map-style dataset that passes its index through ``depth`` functions."""

    def __init__(self, depth: int) -> None:
        self.functions = [identity] * depth

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> int:
        for function in self.functions:
            index = function(index)
        return index


def contestants(depth: int, scale: float) -> list[Contestant]:
    """All ways to run a chain of ``depth`` stages; slow ones draw fewer items, so that runs last alike."""

    def entry(name: str, stream: Any, us_per_hop: float, us_fixed: float = 0.0) -> Contestant:
        timed = max(200, int(scale * 1e6 / (us_per_hop * depth + us_fixed)))
        # Every queue of the chain is full before the clock starts.
        warm = min(timed // 2, 2 * CAPACITY * (depth + 1)) + 50
        return Contestant(name, partial(stream, depth), warm=warm, timed=timed)

    return [
        entry(IDEAL, bare, 1.0),
        entry("bare queue.Queue", plain_queues, 5.0),
        entry(OURS, pipegraph, 2.5),
        entry("pipegraph, 4 workers", partial(pipegraph, workers=4), 5.0),
        entry("torchdata.nodes", torchdata_nodes, 40.0),
        entry("torchdata.nodes, tuned", partial(torchdata_nodes, tuned=True), 3.0),
        entry("SPDL", spdl, 150.0),
        entry("Grain, no queue", grain_maps, 2.0, 20.0),
        entry("Grain, thread prefetch per map", grain_queues, 20.0),
        entry("DataLoader, no queue", dataloader, 0.1, 60.0),
    ]


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--depths", default="1,4,16,64", help="chain lengths (default 1,4,16,64)")
    parser.add_argument("--scale", type=float, default=0.5, help="seconds that a run should take, roughly")
    options = parser.parse_args()
    configuration = {"capacity": CAPACITY, "scale": options.scale}
    chains = {depth: contestants(int(depth), options.scale) for depth in options.depths.split(",")}
    harness.compare("hop_cost", CLAIM, configuration, chains, begins, [IDEAL, OURS], options)


def begins(contestant: Contestant) -> str:
    """The first items must be the first numbers."""
    with contestant.stream() as stream:
        if list(islice(iter(stream), 10)) != list(range(10)):
            raise RuntimeError(f"{contestant.name}: other items than those of the source")
    return "in order"


if __name__ == "__main__":
    main()
