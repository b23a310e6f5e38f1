"""When buckets are reduced: a trace of one step, and the share of reduction time that backward hides.

Claim: gradient buckets are summed and handed back while backward still runs; only the last one is not hidden.

The intervals are those of the side streams' own work (sums and copies), in milliseconds after the start of the
backward phase; "hidden" is what lies before the moment when all backwards have returned.

    python benchmarks/replica_overlap.py --model resnet18
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import harness
import torch
from replica_training import MODELS, made, sgd, whole_batch
from torch.nn.functional import cross_entropy

from pipegraph.replicas import ReplicaExecutor

CLAIM = "buckets are reduced while backward runs"
WIDTH = 72


class Trace:
    """Intervals of side-stream work, and when the first backward began and the last one ended."""

    def __init__(self, executor: ReplicaExecutor) -> None:
        self._lock = threading.Lock()
        self.restart()
        assert executor._reducer is not None
        executor._reducer.streams.observer = self._observe
        runner = executor._runner
        run = runner.run

        def timed(jobs: Mapping[int, Any], serial: bool = False) -> dict[int, Any]:
            backward = all(getattr(job, "__name__", "") == "backward" for job in jobs.values())
            return run({r: self._timed(job) for r, job in jobs.items()} if backward else jobs, serial)

        runner.run = timed  # type: ignore[method-assign]

    def _observe(self, bucket: int, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        work()
        with self._lock:
            self.work.append((bucket, start, time.perf_counter()))

    def _timed(self, backward: Callable[[], Any]) -> Callable[[], None]:
        """Stamped in the replica's own thread: the caller may be woken later."""

        def work() -> None:
            start = time.perf_counter()
            backward()
            end = time.perf_counter()
            with self._lock:
                self.began = min(self.began, start)
                self.ended = max(self.ended, end)

        return work

    def restart(self) -> None:
        """Forget the last step."""
        self.work: list[tuple[int, float, float]] = []
        self.began, self.ended = float("inf"), 0.0

    def hidden(self) -> tuple[float, float]:
        """Seconds of side-stream work before the end of backward, and in all."""
        total = sum(end - start for _, start, end in self.work)
        return sum(max(0.0, min(end, self.ended) - start) for _, start, end in self.work), total

    def rows(self) -> list[dict[str, float]]:
        """Milliseconds after the start of backward."""

        def after(moment: float) -> float:
            return round(1e3 * (moment - self.began), 2)

        return [
            {"bucket": bucket, "start_ms": after(start), "end_ms": after(end)}
            for bucket, start, end in sorted(self.work, key=lambda entry: entry[1])
        ]

    def picture(self) -> str:
        """One line per piece of work; ``|`` is the end of backward."""
        last = max([self.ended, *(end for _, _, end in self.work)])
        scale = WIDTH / (last - self.began)

        def column(moment: float) -> int:
            return int(scale * (moment - self.began))

        lines = ["backward " + "=" * column(self.ended) + "|"]
        for bucket, start, end in sorted(self.work, key=lambda entry: entry[1]):
            lines.append(
                f"bucket {bucket} " + " " * column(start) + "#" * max(1, column(end) - column(start))
            )
        return "\n".join(lines)


def main() -> None:
    parser = harness.arguments(__doc__ or "", rounds=10)
    parser.add_argument("--model", choices=list(MODELS), default="resnet18")
    parser.add_argument("--slots", type=int, default=2)
    options = parser.parse_args()
    configuration = {"model": options.model, "slots": options.slots, "batch": list(MODELS[options.model][1])}
    harness.header(CLAIM, configuration)
    torch.set_num_threads(options.slots)
    x, y = whole_batch(MODELS[options.model][1])
    shares, exposed = [], []
    with ReplicaExecutor(made(options.model), ["cpu"] * options.slots, optimizer=sgd) as executor:

        def step() -> None:
            executor.step(
                {"x": x, "y": y},
                lambda outputs, part: cross_entropy(outputs, part["y"]),
                lambda module, part: module(part["x"]),
            )

        for _ in range(3):
            step()
        reducer = executor._reducer
        assert reducer is not None
        trace = Trace(executor)
        for _ in range(options.rounds):
            trace.restart()
            step()
            hidden, total = trace.hidden()
            shares.append(hidden / total)
            exposed.append(1e3 * (total - hidden))
        sizes = [parameter.nbytes for parameter in executor.module.parameters()]
        buckets = [sum(sizes[index] for index in bucket.offsets) for bucket in reducer.layout]
    share, left = harness.spread(shares), harness.spread(exposed)
    print(trace.picture())
    print(f"reduction time hidden by backward: {share} of all; not hidden: {left} ms")
    if not options.no_record:
        results = {
            "hidden_share": share.to_dict(),
            "not_hidden_ms": left.to_dict(),
            "bucket_bytes": buckets,
            "backward_ms": round(1e3 * (trace.ended - trace.began), 2),
            "last_step": trace.rows(),
        }
        print("recorded in", harness.record("replica_overlap", CLAIM, configuration, results).name)


if __name__ == "__main__":
    main()
