"""Replicas on an accelerator: on slots of one device, and on several devices where there are.

A number from one device with two slots is never called a two-device number.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerators import here
from torch import nn
from torch.nn.functional import cross_entropy

from .conftest import MakeExecutor, assert_close, assert_replicas_equal

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("accelerator")]
PLACES = {
    "one slot": [0],
    "two slots of one device": [0, 0],
    "three slots of one device": [0, 0, 0],
    "two devices": [0, 1],
    "slots of three devices": [0, 1, 2, 0],
}


@pytest.fixture(params=PLACES, ids=lambda name: name.replace(" ", "-"))
def places(request: pytest.FixtureRequest, accelerator: torch.device) -> list[str]:
    chosen = PLACES[request.param]
    if max(chosen) >= torch.accelerator.device_count():
        pytest.skip(f"needs {max(chosen) + 1} devices")
    return [f"{accelerator.type}:{index}" for index in chosen]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3)


def model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(8, 64)]
    for _ in range(2):
        layers += [nn.Tanh(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(64, 4)).double().to(here())


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = (12, 9, 1, 13)[step % 4]
    x = torch.randn(rows, 8, generator=generator, dtype=torch.double)
    return {"x": x, "y": torch.randint(0, 4, (rows,), generator=generator)}


def on_x(module: Any, part: Any) -> Any:
    return module(part["x"])


def mean_loss(outputs: torch.Tensor, part: Any) -> torch.Tensor:
    return cross_entropy(outputs, part["y"])


def there(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.to(here()) for key, value in given.items()}


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_training_equals_one_device(make_executor: MakeExecutor, places: list[str], optimizer: Any) -> None:
    alone = model()
    theirs = optimizer(alone.parameters())
    executor = make_executor(model(), places, optimizer=optimizer)
    for step in range(8):
        theirs.zero_grad()
        loss = mean_loss(on_x(alone, there(batch(step))), there(batch(step)))
        loss.backward()
        theirs.step()
        result = executor.step(batch(step), mean_loss, on_x)
        assert result.loss.item() == pytest.approx(loss.item(), rel=1e-12)
        assert_replicas_equal(executor)
    assert_close(executor, alone)


def test_accumulation_clipping_and_pairs(make_executor: MakeExecutor, places: list[str]) -> None:
    def pair(outputs: torch.Tensor, part: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kept = part["y"] != 3
        return cross_entropy(outputs, part["y"], ignore_index=3, reduction="sum"), kept.sum()

    alone = model()
    theirs = sgd(alone.parameters())
    executor = make_executor(model(), places, optimizer=sgd)
    for step in (0, 1, 3) * 2:
        given = there(batch(step))
        for _ in range(2):
            cross_entropy(on_x(alone, given), given["y"], ignore_index=3).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
        theirs.step()
        theirs.zero_grad()
        with executor.no_sync():
            executor.step(batch(step), pair, on_x)
        executor.step(batch(step), pair, on_x, clip_norm=0.3)
        assert_replicas_equal(executor)
    assert_close(executor, alone)


def test_autocast_and_the_scaler(make_executor: MakeExecutor, accelerator: torch.device) -> None:
    executor = make_executor(model().float(), [here()] * 2, optimizer=sgd)
    scaler = torch.amp.GradScaler(accelerator.type, init_scale=2.0**30)
    for step in range(20):
        given = {"x": batch(step)["x"].float(), "y": batch(step)["y"]}
        with torch.autocast(accelerator.type, dtype=torch.float16):
            executor.step(given, mean_loss, on_x, clip_norm=1.0, scaler=scaler)
        assert_replicas_equal(executor)
    assert scaler.get_scale() < 2.0**30


def test_a_failing_replica_names_its_slot_and_the_executor_continues(make_executor: MakeExecutor) -> None:
    executor = make_executor(model(), [here()] * 2, optimizer=sgd)

    def fail(outputs: torch.Tensor, part: Any) -> torch.Tensor:
        if len(part["x"]) == 4:
            raise KeyError("mine")
        return mean_loss(outputs, part)

    with pytest.raises(KeyError) as caught:
        executor.step(batch(1), fail, on_x)
    assert caught.value.__notes__ == [f"in replica 1 on {here()}#1"]
    executor.step(batch(1), mean_loss, on_x)
    assert_replicas_equal(executor)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_forward_and_the_users_backward_equal_data_parallel(
    make_executor: MakeExecutor, places: list[str]
) -> None:
    """DataParallel on the GPUs it can have: distinct ones."""
    theirs = nn.DataParallel(model(), sorted({torch.device(place).index for place in places}))
    executor = make_executor(model(), places)
    for step in range(4):
        x = there(batch(step))["x"]
        mine, its = executor(x), theirs(x)
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)
        mine.pow(2).mean().backward()
        its.pow(2).mean().backward()
        for ours, other in zip(executor.module.parameters(), theirs.module.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, other.grad, rtol=1e-12, atol=1e-13)
        executor.zero_grad()
        theirs.zero_grad()
