"""From the host to the device: how close the loader comes to a bare copy loop, and what the compute stream waits for.

Claim: at least 0.95 of the bandwidth of a bare loop over pinned memory; a compute stream that never waits while the
loader is faster than the step; no more memory on the device than planned.

    python benchmarks/host_to_device.py --device cuda --rounds 5
    python benchmarks/host_to_device.py --device cpu            # the same path through the CPU's streams

A batch is uint8 images and their labels (256 x 224 x 224 x 3: 38.5 MB). Its slabs are filled already, so that only
the hand-over and the copy are timed. The bare loop copies three filled pinned buffers in turn to three on the device,
on a side stream, and waits for a copy only before it writes to the same place again. On the device ``cpu`` there is
no pinned memory: the bare loop is a memcpy, pipegraph goes through its CPU streams, and the record says so.

The trace: steps of matrix products that take several times as long as a copy, fed by the loader and, for comparison,
with one batch that stays on the device. What counts is the time between kernels on the compute stream.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Contestant, loaded

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator, Traits
from pipegraph.device.accelerator import backend_for
from pipegraph.device.backend import Backend, Slot, normalised
from pipegraph.device.slabs import delivered, pageable
from pipegraph.operators.batch_slabs import StageSlabs

CLAIM = "copies to the device: >= 0.95 of a bare pinned copy loop; the compute stream never waits; memory as planned"
ROW = (224, 224, 3)
CAPACITY = 2
PLANNED = CAPACITY + 5
"""Slabs on the device: those in the queue, one on its way into it and one out of it, the delivered one and the one
before it, and one for jitter."""


class Filled(Operator):
    """Batches whose slabs hold their images already: what costs time behind it is the hand-over and the copy."""

    traits = Traits(slabs=True)

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.labels = torch.arange(rows)
        self.stage: StageSlabs | None = None
        self.filled: set[int] = set()

    def open(self, context: Context) -> None:
        self.stage = StageSlabs(context)

    def process(self, chunk: Chunk) -> Chunk:
        assert self.stage is not None
        slab = self.stage.take(self.rows * 224 * 224 * 3, self.labels)
        if slab.data_ptr() not in self.filled:  # fresh memory is one page of zeros until it is written
            self.filled.add(slab.data_ptr())
            slab.fill_(1)
        images, lease = self.stage.deliver(slab, torch.uint8, (self.rows, *ROW))
        chunk.data = {"image": images, "label": self.labels}
        self.stage.pack(chunk, lease, images)
        return chunk


def pipegraph(device: str, rows: int) -> Any:
    """An endless stream of batches on the device."""
    numbers = pg.Graph("copies").add(ops.FromIterable(lambda: repeat(0), shard=False), capacity=4)
    filled = numbers.then(Filled(rows), capacity=CAPACITY, name="filled")
    return loaded(filled.then(ops.CopyToDevice(device, copy=True), capacity=CAPACITY, name="copy"))


def nbytes(rows: int) -> int:
    """Of one batch as it lies in a slab: the images, and the labels behind them."""
    return rows * 224 * 224 * 3 + rows * 8


def in_host_memory(backend: Backend, nbytes: int) -> torch.Tensor:
    """Pinned, for an accelerator."""
    return pageable(nbytes) if backend.device.type == "cpu" else delivered(nbytes, backend.device)


@contextmanager
def bare(device: str, rows: int) -> Iterator[Any]:
    """Three buffers in turn, nothing else."""
    size = nbytes(rows)
    with backend_for(device) as backend:
        host = [in_host_memory(backend, size).fill_(1) for _ in range(3)]
        there = [backend.alloc(size).fill_(0) for _ in range(3)]
        yield _copies(backend, host, there) if device != "cpu" else _memcpy(host, there)


def _memcpy(host: list[torch.Tensor], there: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    while True:
        for source, target in zip(host, there, strict=True):
            target.copy_(source)
            yield target


def _copies(backend: Backend, host: list[torch.Tensor], there: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    stream = backend.stream(Slot(backend.device), "bare")
    stream.wait_event(backend.current_stream().record_event())
    copied = [backend.event() for _ in host]
    while True:
        for source, target, event in zip(host, there, copied, strict=True):
            event.synchronize()
            with torch.no_grad(), backend.use(stream):
                backend.copy(target, source)
            stream.record_event(event)
            yield target


@contextmanager
def per_batch(device: str, rows: int, pin: bool) -> Iterator[Any]:
    """What a plain loop does: a batch in ordinary memory, moved with ``.to``, pinned first or not."""
    batch = torch.ones(nbytes(rows), dtype=torch.uint8)

    def moved() -> Iterator[torch.Tensor]:
        while True:
            if device == "cpu":
                yield batch.clone()
            elif pin:
                yield batch.pin_memory().to(device, non_blocking=True)
            else:
                yield batch.to(device)

    yield moved()


def check(contestant: Contestant) -> str:
    with contestant.stream() as stream:
        batch = next(iter(stream))
        tensors = list(batch.values()) if isinstance(batch, dict) else [batch]
        return f"{sum(tensor.nbytes for tensor in tensors):,} bytes on {tensors[0].device}"


def used(device: str, rows: int, batches: int = 200) -> dict[str, Any]:
    """Slabs and bytes that the copy stage needs on the device for an ordinary consumer, beside the plan."""
    cuda = device != "cpu"
    before = torch.cuda.memory_allocated(device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with pipegraph(device, rows) as running:
        for _batch in islice(running, batches):
            pass
        counters = running.profile().stages["copy"].counters
    found: dict[str, Any] = {"slabs": counters["slabs_made"], "planned_slabs": PLANNED}
    found |= {"slab_bytes": nbytes(rows), "copies": counters["copies"]}
    if cuda:
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
        found["planned_bytes"] = (PLANNED + 1) * nbytes(rows)
    return found


# The trace.


def stalls(trace: dict[str, Any], gap_us: float = 50.0) -> dict[str, float]:
    """What the busiest stream of a profiler's trace waited for between its first and its last kernel, in microseconds.

    Gaps shorter than ``gap_us`` are the launches' own. ``waits_us`` is the sum of the longer ones.
    """
    kernels: dict[Any, list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            kernels.setdefault(event["args"]["stream"], []).append((event["ts"], event["ts"] + event["dur"]))
    if not kernels:
        raise ValueError("the trace holds no kernels: was the profiler allowed to see the device?")
    spans = sorted(max(kernels.values(), key=lambda stream: sum(end - start for start, end in stream)))
    gaps, end = [], spans[0][1]
    for start, stop in spans[1:]:
        if start - end > gap_us:
            gaps.append(start - end)
        end = max(end, stop)
    return {
        "span_us": end - spans[0][0],
        "busy_us": sum(stop - start for start, stop in spans),
        "waits_us": sum(gaps),
        "waits": len(gaps),
        "longest_us": max(gaps, default=0.0),
    }


class Step:
    """Work that reads the batch and takes several copies' time; on CUDA it is queued and not waited for."""

    def __init__(self, device: str, rows: int) -> None:
        self.size = 4096 if device != "cpu" else 512
        self.left = torch.randn(self.size, self.size, device=device)
        self.sum = torch.zeros((), dtype=torch.int64, device=device)
        self.products = 1
        images = torch.ones((rows, *ROW), dtype=torch.uint8, device=device)
        with backend_for(device) as backend:
            host = in_host_memory(backend, images.nbytes)
            target = torch.empty_like(images).view(-1)
            copy_s = _timed(device, lambda: backend.copy(target, host))
        one_s = _timed(device, lambda: self(images))
        self.products = max(1, round(4 * copy_s / one_s))
        self.images = images

    def __call__(self, images: torch.Tensor) -> None:
        self.sum += images[:, ::16, ::16].sum()
        product = self.left
        for _ in range(self.products):
            product = torch.tanh(product @ self.left)


def _timed(device: str, work: Any) -> float:
    """Median seconds of one call, the device's work included."""

    def settle() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(6):
        settle()
        start = time.perf_counter()
        work()
        settle()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[2]


def trained(step: Step, batches: Any, count: int) -> None:
    for batch in islice(batches, count):
        step(batch["image"])


def traced(device: str, step: Step, batches: Any, count: int) -> dict[str, float]:
    """Run steps under the profiler, which has the device's own record of its streams; on the CPU, by the clock."""
    trained(step, batches, 10)
    if device == "cpu":
        start = time.perf_counter()
        trained(step, batches, count)
        return {"span_s": time.perf_counter() - start}
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=kinds) as profile:
        trained(step, batches, count)
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return stalls(json.loads(path.read_text()))


def trace(device: str, rows: int, count: int) -> dict[str, Any]:
    """Waits of the compute stream, fed by the loader and with a batch that stays on the device."""
    step = Step(device, rows)
    with pipegraph(device, rows) as running:
        fed = traced(device, step, iter(running), count)
    resident = traced(device, step, repeat({"image": step.images}), count)
    return {"products_per_step": step.products, "steps": count, "fed": fed, "resident": resident}


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=256, help="images in a batch (default 256: 38.5 MB)")
    parser.add_argument("--batches", type=int, default=200, help="timed batches per round")
    options = parser.parse_args()
    device, rows, count = str(normalised(options.device)), options.rows, options.batches
    torch.set_num_threads(1)
    what = torch.cuda.get_device_name(device) if device != "cpu" else "CPU streams, no pinned memory"
    ways = {"bare": partial(bare, device, rows), "pipegraph": partial(pipegraph, device, rows)}
    ways[".to per batch" if device != "cpu" else "clone per batch"] = partial(per_batch, device, rows, False)
    if device != "cpu":
        ways[".pin_memory().to per batch"] = partial(per_batch, device, rows, True)
    configuration = {"device": device, "what": what, "batch_bytes": nbytes(rows), "batches": count}
    entered = [Contestant(name, way, 20, count, nbytes(rows) / 1e6) for name, way in ways.items()]
    harness.compare("host_to_device", CLAIM, configuration, entered, check, ["bare"], options)
    results = {"memory": used(device, rows), "trace": trace(device, rows, 60)}
    print(json.dumps(results, indent=2))
    harness.keep("host_to_device_trace", CLAIM, configuration, results, options)


if __name__ == "__main__":
    main()
