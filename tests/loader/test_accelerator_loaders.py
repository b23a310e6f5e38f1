"""Loaders whose batches end on an accelerator: pinned, from another process, and resumed. The loops never wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops

pytestmark = pytest.mark.accelerator
ROWS, COUNT = 4, 40


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Sample i is a row of i's."""

    def __len__(self) -> int:
        return ROWS * COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256,), float(index))


def as_rows(batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": batch.float()[:, None].expand(-1, 256).contiguous()}


def batches() -> pg.Node:
    return pg.Graph().add(ops.FromSequence(list(range(ROWS * COUNT)))).then(ops.Batch(ROWS)).then(as_rows)


def sums(loader: Any, device: torch.device, at_most: int = COUNT) -> list[float]:
    """The sum of every batch, asked for after the loop; the loop sends what is not on the device yet."""
    found = []
    for batch in loader:
        x = batch["x"] if isinstance(batch, dict) else batch
        found.append(x.to(device, non_blocking=True).sum())
        del batch, x
        if len(found) == at_most:
            break
    return [total.item() for total in found]


EXPECTED = [256.0 * sum(range(ROWS * n, ROWS * (n + 1))) for n in range(COUNT)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_with_pinned_batches(accelerator: torch.device, workers: int) -> None:
    loader = pg.DataLoader(Numbers(), ROWS, pin_memory=True, num_workers=workers)
    assert all(batch.is_pinned() for batch in loader)
    assert sums(loader, accelerator) == EXPECTED


def test_a_graph_that_ends_in_pin(accelerator: torch.device) -> None:
    with batches().then(ops.Pin()).graph.loader() as loader:
        assert sums(loader, accelerator) == EXPECTED


def test_a_copy_of_the_graphs_own(accelerator: torch.device) -> None:
    with batches().then(ops.CopyToDevice("accelerator")).graph.loader() as loader:
        assert sums(loader, accelerator) == EXPECTED


@pytest.mark.parametrize("last", [ops.Pin, lambda: ops.CopyToDevice("accelerator")], ids=["pin", "copy"])
def test_a_resumed_loader_continues_behind_late_copies(accelerator: torch.device, last: Any) -> None:
    with batches().then(last()).graph.loader() as loader:
        first = sums(loader, accelerator, at_most=13)
        state = loader.state_dict()
    with batches().then(last()).graph.loader() as loader:
        loader.load_state_dict(state)
        assert first + sums(loader, accelerator) == EXPECTED
