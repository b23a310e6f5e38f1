"""The executor beside torch.nn.DataParallel and plain training on GPUs, and what scatter and gather cost.

Claim: one slot within 2 % of plain training; two slots pay less for scatter, replicate and gather than
DataParallel does.

    python benchmarks/replica_parts.py --devices cuda:0 cuda:0      # two slots of one GPU
    python benchmarks/replica_parts.py --devices cuda:0 cuda:1      # two GPUs
    python benchmarks/replica_parts.py --devices cpu cpu            # without DataParallel, which has no CPU path

A number from one GPU with two slots is never called a two-GPU number: the record holds the devices. DataParallel
runs on the distinct GPUs among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import harness
import torch
from harness import Contestant
from replica_models import resnet18, wide_mlp
from torch import nn
from torch.nn.functional import cross_entropy

from pipegraph.replicas import ReplicaExecutor, gather, parallel_apply, replicate, scatter

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (resnet18, (32, 3, 64, 64)),
    "mlp": (wide_mlp, (512, 1024)),
}
CLAIM = "1 slot within 2 % of plain; 2 slots: less for scatter, replicate and gather than DataParallel"


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def whole_batch(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(shape), torch.randint(0, 1000, shape[:1])


def made(model: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[model][0]()


@contextmanager
def trained(step: Callable[[], torch.Tensor]) -> Iterator[Iterator[float]]:
    """An endless stream of losses; reading the value waits for the device."""
    yield (step().item() for _ in iter(int, 1))


@contextmanager
def executor(model: str, devices: list[str]) -> Iterator[Iterator[float]]:
    x, y = whole_batch(MODELS[model][1])
    batch = {"x": x.to(devices[0]), "y": y.to(devices[0])}
    with ReplicaExecutor(made(model).to(devices[0]), devices, optimizer=sgd) as running:
        step = partial(
            running.step,
            batch,
            lambda outputs, part: cross_entropy(outputs, part["y"]),
            lambda module, part: module(part["x"]),
        )
        yield (step().loss.item() for _ in iter(int, 1))


def looped(network: nn.Module, device: str, model: str) -> Callable[[], torch.Tensor]:
    """A step of an ordinary loop."""
    x, y = (given.to(device) for given in whole_batch(MODELS[model][1]))
    optimizer = sgd(network.parameters())

    def step() -> torch.Tensor:
        loss = cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(model: str, device: str) -> Any:
    return trained(looped(made(model).to(device), device, model))


def data_parallel(model: str, devices: list[str]) -> Any:
    ordinals = sorted({torch.device(device).index for device in devices})
    return trained(looped(nn.DataParallel(made(model).to(devices[0]), ordinals), devices[0], model))


def parts(model: str, devices: list[str]) -> Any:
    """Scatter, replicate, parallel apply and gather without training, as a DataParallel forward does."""
    network = made(model).to(devices[0])
    x = whole_batch(MODELS[model][1])[0].to(devices[0])

    def step() -> torch.Tensor:
        with torch.no_grad():
            pieces = scatter(x, devices)
            replicas = replicate(network, devices[: len(pieces)], detach=True)
            joined: torch.Tensor = gather(parallel_apply(replicas, pieces, devices=devices), devices[0])
        return joined.sum()

    return trained(step)


def data_parallel_forward(model: str, devices: list[str]) -> Any:
    ordinals = sorted({torch.device(device).index for device in devices})
    network = nn.DataParallel(made(model).to(devices[0]), ordinals)
    x = whole_batch(MODELS[model][1])[0].to(devices[0])

    def step() -> torch.Tensor:
        with torch.no_grad():
            return network(x).sum()  # type: ignore[no-any-return]

    return trained(step)


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--model", choices=list(MODELS), default="resnet18")
    parser.add_argument("--devices", nargs="+", default=["cuda:0", "cuda:0"])
    parser.add_argument("--steps", type=int, default=20, help="timed steps per round")
    options = parser.parse_args()
    model, devices = options.model, options.devices
    entrants: dict[str, Callable[[], Any]] = {
        "plain": partial(plain, model, devices[0]),
        "executor, 1 slot": partial(executor, model, devices[:1]),
        f"executor, {len(devices)} slots": partial(executor, model, devices),
        "forward of the parts": partial(parts, model, devices),
    }
    if torch.device(devices[0]).type == "cuda":
        entrants["DataParallel"] = partial(data_parallel, model, devices)
        entrants["forward of DataParallel"] = partial(data_parallel_forward, model, devices)

    def check(contestant: Contestant) -> str:
        with contestant.stream() as losses:
            return " ".join(f"{next(iter(losses)):.4f}" for _ in range(2))

    harness.compare(
        "replica_parts",
        CLAIM,
        {"model": model, "devices": devices, "steps": options.steps, "rounds": options.rounds},
        [Contestant(name, stream, 3, options.steps) for name, stream in entrants.items()],
        check,
        ["plain", "forward of the parts"],
        "steps",
        options,
    )


if __name__ == "__main__":
    main()
