"""Training on CPU slots: the replica executor beside plain training and beside DDP, on the same cores.

Claim: one slot costs at most 3 % beside plain training; two slots of one thread each train at least 1.7 times as
fast as one slot of one thread, where a step takes over 20 ms; and at least as fast as DDP with two
gloo processes of one thread each.

Every contestant trains the same model on the same global batch with SGD and momentum. "no reduction" is the limit
for two: two processes that train half the batch each and exchange nothing. torch.nn.DataParallel has no
CPU path, so it is no contestant here. On a machine that others use too, read the CPU time of each step: 2 x (CPU of
one slot) / (CPU of two slots) is the speed-up that two free cores would give.

    python benchmarks/replica_training.py --model resnet18 --rounds 5
    python benchmarks/replica_training.py --model mlp --rounds 5
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import harness
import torch
from harness import Contestant
from replica_models import resnet18, resnet20, wide_mlp
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from pipegraph.replicas import ReplicaExecutor

CLAIM = "1 slot <= 3 % over plain; 2 slots >= 1.7 x 1 slot; >= DDP with 2 gloo processes"
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "resnet18": (resnet18, (32, 3, 64, 64)),
    "resnet20": (resnet20, (128, 3, 32, 32)),
    "mlp": (wide_mlp, (512, 1024)),
}
PLAIN, ONE, TWO = "plain, 1 thread", "executor, 1 slot of 1 thread", "executor, 2 slots of 1 thread"
DDP, LIMIT = "DDP, 2 gloo processes", "2 processes, no reduction"


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def whole_batch(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(shape), torch.randint(0, 1000, shape[:1])


def made(model: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return MODELS[model][0]()


def steps(network: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Iterator[float]:
    """Plain training."""
    optimizer = sgd(network.parameters())
    while True:
        optimizer.zero_grad()
        loss = cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


@contextmanager
def plain(model: str) -> Iterator[Iterator[float]]:
    torch.set_num_threads(1)
    yield steps(made(model), *whole_batch(MODELS[model][1]))


@contextmanager
def executor(model: str, slots: int) -> Iterator[Iterator[float]]:
    torch.set_num_threads(slots)  # dealt among the slots: one thread each
    x, y = whole_batch(MODELS[model][1])
    with ReplicaExecutor(made(model), ["cpu"] * slots, optimizer=sgd) as trained:
        yield (
            trained.step(
                {"x": x, "y": y},
                lambda outputs, part: cross_entropy(outputs, part["y"]),
                lambda module, part: module(part["x"]),
            ).loss.item()
            for _ in iter(int, 1)
        )


@contextmanager
def processes(model: str, reduce: bool) -> Iterator[Iterator[float]]:
    """Two workers that make a step when told to; an item is a step of both."""
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", str(rank), f"{folder}/store", str(int(reduce)), model],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]

        def told() -> Iterator[float]:
            while True:
                for worker in workers:
                    assert worker.stdin is not None
                    worker.stdin.write("step\n")
                    worker.stdin.flush()
                losses = []
                for worker in workers:
                    assert worker.stdout is not None
                    losses.append(float(worker.stdout.readline()))
                yield sum(losses) / 2

        try:
            yield told()
        finally:
            for worker in workers:
                worker.communicate()


def work(rank: int, store: str, reduce: bool, model: str) -> None:
    """A worker process: a step per line read."""
    torch.set_num_threads(1)
    network = made(model)
    if reduce:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        network = DistributedDataParallel(network)
    x, y = (given.chunk(2)[rank] for given in whole_batch(MODELS[model][1]))
    trained = steps(network, x, y)
    for _ in sys.stdin:
        print(next(trained), flush=True)
    if reduce:
        torch.distributed.destroy_process_group()


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--model", choices=list(MODELS), default="resnet18")
    parser.add_argument("--steps", type=int, default=12, help="timed steps per round")
    options = parser.parse_args()
    shape = MODELS[options.model][1]
    entrants = {
        PLAIN: partial(plain, options.model),
        ONE: partial(executor, options.model, 1),
        TWO: partial(executor, options.model, 2),
        DDP: partial(processes, options.model, True),
        LIMIT: partial(processes, options.model, False),
    }

    def check(contestant: Contestant) -> str:
        with contestant.stream() as losses:
            return " ".join(f"{next(iter(losses)):.4f}" for _ in range(3))

    parameters = sum(parameter.numel() for parameter in made(options.model).parameters())
    harness.compare(
        "replica_training",
        CLAIM,
        {"model": options.model, "parameters": parameters, "batch": list(shape), "steps": options.steps,
         "rounds": options.rounds},
        [Contestant(name, stream, 3, options.steps) for name, stream in entrants.items()],
        check,
        [PLAIN, ONE, DDP, LIMIT],
        "steps",
        options,
    )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]), sys.argv[3], bool(int(sys.argv[4])), sys.argv[5])
    else:
        main()
