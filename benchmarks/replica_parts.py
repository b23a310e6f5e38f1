"""The executor beside torch.nn.DataParallel and plain training on GPUs.

Claim: one slot within 2 % of plain training; two slots ahead of DataParallel.

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
from torch import nn
from torch.nn.functional import cross_entropy

from pipegraph.replicas import ReplicaExecutor

SHAPE = (32, 3, 64, 64)
CLAIM = "1 slot within 2 % of plain; 2 slots ahead of DataParallel"


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride != 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x_NCHW)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x_NCHW))


def resnet18(classes: int = 1000) -> nn.Module:
    """11.7 M parameters, 46.8 MB in float32."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def whole_batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(SHAPE), torch.randint(0, 1000, SHAPE[:1])


def made(device: str) -> nn.Module:
    torch.manual_seed(1)
    return resnet18().to(device)


@contextmanager
def trained(step: Callable[[], torch.Tensor]) -> Iterator[Iterator[float]]:
    """An endless stream of losses; reading the value waits for the device."""
    yield (step().item() for _ in iter(int, 1))


@contextmanager
def executor(devices: list[str]) -> Iterator[Iterator[float]]:
    x, y = whole_batch()
    batch = {"x": x.to(devices[0]), "y": y.to(devices[0])}
    with ReplicaExecutor(made(devices[0]), devices, optimizer=sgd) as running:
        step = partial(
            running.step,
            batch,
            lambda outputs, part: cross_entropy(outputs, part["y"]),
            lambda module, part: module(part["x"]),
        )
        yield (step().loss.item() for _ in iter(int, 1))


def looped(network: nn.Module, device: str) -> Callable[[], torch.Tensor]:
    """A step of an ordinary loop."""
    x, y = (given.to(device) for given in whole_batch())
    optimizer = sgd(network.parameters())

    def step() -> torch.Tensor:
        loss = cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(device: str) -> Any:
    return trained(looped(made(device), device))


def data_parallel(devices: list[str]) -> Any:
    ordinals = sorted({torch.device(device).index for device in devices})
    return trained(looped(nn.DataParallel(made(devices[0]), ordinals), devices[0]))


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--devices", nargs="+", default=["cuda:0", "cuda:0"])
    parser.add_argument("--steps", type=int, default=20, help="timed steps per round")
    options = parser.parse_args()
    devices = options.devices
    entrants: dict[str, Callable[[], Any]] = {
        "plain": partial(plain, devices[0]),
        "executor, 1 slot": partial(executor, devices[:1]),
        f"executor, {len(devices)} slots": partial(executor, devices),
    }
    if torch.device(devices[0]).type == "cuda":
        entrants["DataParallel"] = partial(data_parallel, devices)

    def check(contestant: Contestant) -> str:
        with contestant.stream() as losses:
            return " ".join(f"{next(iter(losses)):.4f}" for _ in range(2))

    harness.compare(
        "replica_parts",
        CLAIM,
        {"model": "resnet18", "devices": devices, "steps": options.steps},
        [Contestant(name, stream, 3, options.steps) for name, stream in entrants.items()],
        check,
        ["plain"],
        options,
    )


if __name__ == "__main__":
    main()
