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


@pytest.mark.parametrize("isolate", [False, True])
def test_a_copy_of_the_graphs_own(accelerator: torch.device, isolate: bool) -> None:
    with batches().then(ops.CopyToDevice("accelerator")).graph.loader(isolate=isolate) as loader:
        assert sums(loader, accelerator) == EXPECTED


@pytest.mark.parametrize("last", [ops.Pin, lambda: ops.CopyToDevice("accelerator")], ids=["pin", "copy"])
def test_a_resumed_loader_continues_behind_late_copies(accelerator: torch.device, last: Any) -> None:
    with batches().then(last()).graph.loader() as loader:
        first = sums(loader, accelerator, at_most=13)
        state = loader.state_dict()
    with batches().then(last()).graph.loader() as loader:
        loader.load_state_dict(state)
        assert first + sums(loader, accelerator) == EXPECTED


def test_a_pin_behind_slabs_that_another_process_writes_runs_here(accelerator: torch.device) -> None:
    graph = pg.Graph()
    rows = [{"image": torch.full((2, 3, 3), i, dtype=torch.uint8)} for i in range(16)]
    slabs = graph.add(ops.FromSequence(rows)).then(ops.Batch(4)).then(ops.Normalize((0.0,) * 3, (1.0,) * 3))
    node = slabs.then(ops.Pin()).then(ops.CopyToDevice(accelerator))
    assert "pin: left out: the slabs of 'normalize' are pinned already" in str(graph.plan(node))
    with graph.loader(node, isolate=True) as loader:
        images = [batch["image"] for batch in loader]
        assert loader.profile().stages["pin"].counters["bytes_written"] > 0
    assert [round(float(image.mean()) * 510) for image in images] == [3, 11, 19, 27]
