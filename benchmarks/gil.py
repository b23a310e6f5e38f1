"""How long an image holds the interpreter's lock: by step of the recipe, and in the pipeline's threads.

Claim: of the CPU time of an image the lock is held for so many microseconds, in so many pieces.

A small library, compiled at the start and preloaded, stands before ``pthread_cond_signal``, which CPython calls once
when a thread takes the lock and once when it gives it up. Between the two it counts the thread's CPU time and the
pieces. On a busy machine the time is up to twice as long. The reading thread and the training loop are not counted. The
steps are run one by one, each over all photographs in one thread; in a pipeline they find colder caches and take
longer.

    python benchmarks/gil.py --images FOLDER --rounds 3
    python benchmarks/gil.py --images FOLDER --only "14 thread"
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import numpy as np
import recipe
from images import SIZE, files, one_thread_each, photographs
from tables import comparison

CLAIM = "how long, and in how many pieces, an image holds the interpreter's lock, beside its CPU time"
LIBRARY = "PIPEGRAPH_LOCK_COUNTER"
BATCH = 64
DECODERS = ("auto", "opencv", "simplejpeg", "nvimgcodec")
PLACES = ("2 thread", "14 thread", "14 process")
COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
static int (*signal_of_libc)(pthread_cond_t *);
static char *runtime;
static _Atomic long long pieces, held;
static __thread int holds, aside;
static __thread long long since;
static long long cpu(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
int pthread_cond_signal(pthread_cond_t *cond) {
    if (!signal_of_libc) {
        signal_of_libc = dlsym(RTLD_NEXT, "pthread_cond_signal");
        runtime = dlsym(RTLD_DEFAULT, "_PyRuntime");
    }
    int result = signal_of_libc(cond);
    if ((char *)cond < runtime || (char *)cond >= runtime + RUNTIME_NBYTES) return result;
    holds = !holds;
    if (holds) since = cpu();
    else if (!aside) { pieces++; held += cpu() - since; }
    return result;
}
void leave_aside(void) { aside = 1; }
void totals(long long *out) { out[0] = pieces; out[1] = held; }
"""


class Lock:
    """The counter in this process: pieces and microseconds so far."""

    def __init__(self) -> None:
        self._library = ctypes.PyDLL(os.environ[LIBRARY])

    def aside(self) -> None:
        """Do not count the calling thread."""
        self._library.leave_aside()

    def totals(self) -> np.ndarray[Any, Any]:
        found = (ctypes.c_longlong * 2)()
        self._library.totals(found)
        return np.array([found[0], found[1] / 1e3])


def step_functions(paths: list[str], decoders: tuple[str, ...]) -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Each step as a function of the image's number; what one makes the next is given."""
    import torch

    from pipegraph.operators.images.backends import open_backend
    from pipegraph.operators.images.crop import DRAWS, RandomResizedCrop, crop_window
    from pipegraph.operators.images.header import probe
    from pipegraph.operators.images.native import NativeRows
    from pipegraph.operators.normalize import row_filler, tables_of
    from pipegraph.randomness import digest, generator
    from pipegraph.storage.shard_files import read_file

    crop, numbers = RandomResizedCrop(), range(len(paths))
    encoded = [read_file(path) for path in paths]
    headers = [probe(data) for data in encoded]

    def draw(i: int) -> list[float]:
        drawn: list[float] = generator(0, 0, (i,), "decode").random(DRAWS).tolist()
        return drawn

    drawn = [draw(i) for i in numbers]

    def window(i: int) -> Any:
        return crop_window(crop, 0.5, *headers[i].size, (SIZE, SIZE), drawn[i])

    windows = [window(i) for i in numbers]
    pixels, planes = np.zeros((SIZE, SIZE, 3), np.uint8), np.zeros((3, SIZE, SIZE), np.int32)
    many = np.zeros((32, 3, SIZE, SIZE), np.int32)
    fill = row_filler(recipe.MEAN, recipe.STD, torch.float32, "NCHW")
    yield "read", lambda i: read_file(paths[i])
    yield "header", lambda i: probe(encoded[i])
    yield "draw", draw
    yield "crop", window
    rows = NativeRows((SIZE, SIZE, 3), True, tables_of(recipe.MEAN, recipe.STD, torch.float32), crop, 0.5)

    def compiled(i: int) -> None:
        if i % 32 == 0:
            digests = [digest(0, 0, (n,), "decode") for n in range(i, i + 32)]
            rows.decode(paths[i : i + 32], True, digests, many)

    yield "all of it for 32 images in one call, compiled", compiled
    for name in decoders:
        into = open_backend(name).decode_into
        decode = partial(lambda into, i: into(encoded[i], headers[i], windows[i], pixels, "linear"), into)
        yield f"decode and resize, {name}", decode
    yield "normalise", lambda i: fill(pixels, planes)


def steps(paths: list[str], lock: Lock) -> dict[str, list[float]]:
    """Of each step: pieces, microseconds that it holds the lock, and of CPU, per image."""
    found: dict[str, list[float]] = {}

    def run() -> None:
        for name, function in step_functions(paths, DECODERS[1:]):
            function(0)
            before, begun = lock.totals(), time.thread_time()
            for i in range(len(paths)):
                function(i)
            spent = 1e6 * (time.thread_time() - begun)
            time.sleep(0)  # ends the piece
            found[name] = [*((lock.totals() - before) / len(paths)).tolist(), spent / len(paths)]

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()
    return found


def pipeline(paths: list[str], lock: Lock, name: str, seconds: float) -> dict[str, list[float]]:
    """A span of the recipe: pieces, microseconds of lock, of CPU and of wall time per image."""
    import pipegraph as pg
    from pipegraph import operators as ops

    decoder, workers, backend, beside = name.split()

    places: Any = {"workers": int(workers), "backend": backend}
    decode = ops.DecodeImage(SIZE, crop=ops.RandomResizedCrop(), flip=0.5, backend=decoder)
    batches = files(pg.Graph("recipe", seed=7), paths).then(ops.Batch(BATCH), capacity=1)
    last = batches.then(decode, **places).then(
        ops.Normalize(recipe.MEAN, recipe.STD, layout="NCHW"), **places
    )
    stop = threading.Event()

    def train() -> None:
        lock.aside()
        while not stop.is_set():
            pass

    training = threading.Thread(target=train)
    lock.aside()
    with harness.loaded(last) as loader:
        stream = iter(loader)
        for _ in islice(stream, 2 * int(workers)):
            pass
        if beside == "busy":
            training.start()
            busy = time.pthread_getcpuclockid(training.ident)
        before, clock, until = lock.totals(), harness.Clock(), time.perf_counter() + seconds
        taken, aside = 0, time.clock_gettime(busy) if training.ident else 0.0
        while time.perf_counter() < until:
            next(stream)
            taken += BATCH
        wall, spent = clock.read()
        if training.ident:
            spent -= time.clock_gettime(busy) - aside
        held = (lock.totals() - before) / taken
        stop.set()
    return {name: [*held.tolist(), 1e6 * spent / taken, 1e6 * wall / taken]}


def compiled(folder: str) -> Path:
    source, library = Path(folder, "counter.c"), Path(folder, "counter.so")
    ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime")  # it is there: this is CPython
    source.write_text(COUNTER.replace("RUNTIME_NBYTES", "400000"))
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def main() -> None:
    parser = harness.arguments(__doc__, rounds=3, images=True)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each span of a pipeline takes")
    options = parser.parse_args()
    paths = photographs(options.images)
    if options.child:
        one_thread_each()
        lock, alone = Lock(), options.child == "steps"
        found = steps(paths, lock) if alone else pipeline(paths, lock, options.child, options.seconds)
        print(json.dumps(found))
        return
    names = ["steps"]
    names += [f"{d} {p} {b}" for d in DECODERS for p in PLACES for b in ("quiet", "busy")]
    names = [name for name in names if any(part.strip() in name for part in options.only.split(","))]
    configuration = {"photographs": len(paths), "batch": BATCH, "size": SIZE, "rounds": options.rounds}
    harness.header(CLAIM, configuration)
    runs: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = str(compiled(folder))
        counter = {"LD_PRELOAD": library, LIBRARY: library}
        command = [sys.executable, __file__, "--images", options.images]
        command += ["--seconds", str(options.seconds), "--child"]
        for _ in range(options.rounds):
            for name in names:
                for key, values in harness.ask([*command, name], environment=counter).items():
                    runs.setdefault(key, []).append(values)
    columns = ("pieces", "held_us", "cpu_us", "wall_us")
    results: dict[str, Any] = {}
    for key, rounds in runs.items():
        measures = zip(columns, zip(*rounds, strict=True), strict=False)
        results[key] = {column: harness.spread(values) for column, values in measures}
    print(comparison(results))
    harness.keep("gil", CLAIM, configuration, results, options)


if __name__ == "__main__":
    main()
