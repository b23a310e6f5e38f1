"""A folder in which one image in ten is bad: what is delivered, what is in the ledger, what is raised, all exact."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops

N = 200
KINDS = ("truncated", "empty", "not an image", "wrong extension")
BAD = {i: KINDS[(i // 10) % 4] for i in range(7, N, 10)}
FAILING = [i for i, kind in BAD.items() if kind != "wrong extension"]


def encoded(value: int, kind: str) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    pixels = np.add.outer(np.arange(40), np.arange(30))[:, :, None] + np.array([value, 2 * value, 0])
    Image.fromarray((pixels % 256).astype(np.uint8)).save(out, kind, quality=90)
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for i in range(N):
        data = encoded(i, "JPEG")
        kind = BAD.get(i)
        if kind == "truncated":
            data = data[: len(data) * (3 if i % 20 < 10 else 1) // 4]
        elif kind == "empty":
            data = b""
        elif kind == "not an image":
            data = b"this is text, whatever its name says" * 20
        elif kind == "wrong extension":
            data = encoded(i, "PNG")
        (root / f"{i:03}.jpg").write_bytes(data)
    return root


def graph_of(folder: Path, policy: pg.Skip | pg.Retry | str, batched: bool, workers: int) -> pg.Graph:
    graph = pg.Graph("corrupt", seed=1)
    node = graph.add(ops.ListFiles(folder)).then(ops.Load(), workers=2)
    if batched:
        node = node.then(ops.Batch(16))
    node.then(ops.DecodeImage(24, backend="opencv"), workers=workers, on_error=policy, name="decode")
    return graph


def keys_of(batch: dict, batched: bool) -> list[str]:
    return batch["key"] if batched else [batch["key"]]


SHAPES = pytest.mark.parametrize(
    ("batched", "workers"), [(False, 1), (False, 3), (True, 1), (True, 3)], ids=lambda value: str(value)
)


@SHAPES
@pytest.mark.parametrize(
    "policy", [pg.Skip(), pg.Skip(len(FAILING)), pg.Skip(0.2), pg.Retry(2, then=pg.Skip())], ids=repr
)
def test_skip_leaves_out_just_the_bad_ones_and_lists_each(folder, policy, batched, workers):
    with graph_of(folder, policy, batched, workers).loader() as loader:
        delivered = [key for batch in loader for key in keys_of(batch, batched)]
        profile = loader.profile()
    assert delivered == [f"{i:03}.jpg" for i in range(N) if i not in FAILING]
    assert [(q.key, q.position, q.stage) for q in profile.quarantined] == [
        (f"{i:03}.jpg", i, "decode") for i in FAILING
    ]
    for entry in profile.quarantined:
        assert entry.error.startswith("DecodeError: ")
    assert profile.stages["decode"].failed == len(FAILING)
    assert profile.stages["decode"].retried == (2 * len(FAILING) if isinstance(policy, pg.Retry) else 0)
