"""Models of the replica executor on several slots of the CPU: its threads, streams and the reducer."""

from __future__ import annotations

from typing import Any

import torch
from scheduler.model import Model
from scheduler.vehicles import RealThread
from torch import nn

from pipegraph.replicas import ReplicaExecutor

STEPS = 2


class Broken(Exception):
    """What the loss of one replica raises."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 3, generator=generator) for _ in range(STEPS)]


def square(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class ReducerModel(Model):
    """Three replicas train two steps; one loss may raise once, Ctrl-C may come once.

    After each step that succeeds all replicas equal the model that was trained alone on the same steps; afterwards no
    thread is left.
    """

    vehicle = RealThread
    reference: list[list[torch.Tensor]] = []

    @classmethod
    def prepare(cls) -> None:
        torch.set_num_threads(1)
        if not cls.reference:
            model = network()
            optimizer = sgd(model.parameters())
            for batch in batches():
                optimizer.zero_grad()
                square(model(batch), batch).backward()
                optimizer.step()
                cls.reference.append([each.detach().clone() for each in model.parameters()])
            with ReplicaExecutor(network(), ["cpu"] * 3, optimizer=sgd) as executor:
                executor.step(batches()[0], square)

    def run(self) -> None:
        fails = self.draw.random() < 0.3
        with ReplicaExecutor(network(), ["cpu"] * 3, optimizer=sgd) as executor:
            for number, batch in enumerate(batches()):
                if fails and number == 0:
                    try:
                        executor.step(batch, self.loss_that_fails(self.draw.randrange(3)))
                    except Broken:
                        pass
                    else:
                        raise AssertionError("the error was lost")
                executor.step(batch, square)
                for replica in executor._replicas.parameters:
                    for mine, alone in zip(replica, self.reference[number], strict=True):
                        torch.testing.assert_close(mine, alone)

    def loss_that_fails(self, at: int) -> Any:
        calls = iter(range(100))

        def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            if next(calls) == at:
                raise Broken
            return square(output, batch)

        return loss
