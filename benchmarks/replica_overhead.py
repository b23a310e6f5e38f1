"""What the executor costs beside plain training with one slot, step by step, in CPU time.

Claim: at most 3 % for a model of ResNet-18's size.

A plain step and an executor's step alternate, both on one thread, each on its own copy of the model, on the
same batch. Both drop their gradients at their end; else the one would allocate from the memory that the
other has freed. The CPU time of the calling thread is compared pair by pair: what others do on
the machine hardly bends it. The fixed cost of a step shows on a tiny model, where it is all there is.

    python benchmarks/replica_overhead.py --rounds 40
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
from replica_models import resnet18
from replica_training import sgd
from torch import nn
from torch.nn.functional import cross_entropy

from pipegraph.replicas import ReplicaExecutor

CLAIM = "one slot costs at most 3 % beside plain training of ResNet-18"


def tiny() -> nn.Module:
    return nn.Linear(8, 1000)


def cpu_of(step: Callable[[], Any]) -> float:
    start = time.thread_time()
    step()
    return time.thread_time() - start


def paired(make: Callable[[], nn.Module], shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Ratios and differences of alternated steps, and their medians."""
    torch.manual_seed(0)
    x, y = torch.randn(shape), torch.randint(0, 1000, shape[:1])
    network = make()
    optimizer = sgd(network.parameters())

    def plainly() -> None:
        cross_entropy(network(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    with ReplicaExecutor(make(), ["cpu"], optimizer=sgd) as executor:
        ours = partial(
            executor.step,
            {"x": x, "y": y},
            lambda outputs, part: cross_entropy(outputs, part["y"]),
            lambda module, part: module(part["x"]),
        )
        pairs = []
        for number in range(rounds + 3):
            # The order within a pair alternates too.
            if number % 2:
                mine, plain = cpu_of(ours), cpu_of(plainly)
            else:
                plain, mine = cpu_of(plainly), cpu_of(ours)
            pairs.append((plain, mine))
    timed = pairs[3:]
    ratios = statistics.quantiles([mine / plain for plain, mine in timed], n=4)
    return {
        "plain_ms": round(1e3 * statistics.median(plain for plain, _ in timed), 4),
        "ratio_quartiles": [round(ratio, 4) for ratio in ratios],
        "difference_us": round(1e6 * statistics.median(mine - plain for plain, mine in timed), 1),
    }


def main() -> None:
    parser = harness.arguments(__doc__ or "", rounds=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    configuration = {"rounds": options.rounds, "batch": [8, 3, 96, 96]}
    harness.header(CLAIM, configuration)
    results = {
        "resnet18": paired(resnet18, (8, 3, 96, 96), options.rounds),
        "tiny": paired(tiny, (2, 8), 50 * options.rounds),
    }
    for name, row in results.items():
        low, middle, high = row["ratio_quartiles"]
        print(
            f"{name}: plain {row['plain_ms']} ms, executor / plain {middle:.4f} (quartiles {low:.4f}-{high:.4f}), "
            f"difference {row['difference_us']} us"
        )
    if not options.no_record:
        print("recorded in", harness.record("replica_overhead", CLAIM, configuration, results).name)


if __name__ == "__main__":
    main()
