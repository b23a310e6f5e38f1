"""``Normalize`` right behind ``DecodeImage`` is done in the same go: nothing that is delivered changes."""

from __future__ import annotations

import json
import threading

import cv2
import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def encoded(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (60 + number, 90, 3), dtype=np.uint8)
    return cv2.imencode(".jpg", cv2.GaussianBlur(pixels, (0, 0), 3))[1].tobytes()


SAMPLES = [{"key": f"k{n}", "image": encoded(n), "label": n} for n in range(10)]


def graph(
    backend="thread", batch=4, samples=SAMPLES, on_error="raise", dtype=torch.float32, layout="NCHW"
) -> pg.Graph:
    made = pg.Graph("fused", seed=3)
    node = made.add(ops.FromSequence(samples))
    if batch:
        node = node.then(ops.Batch(batch))
    node = node.then(
        ops.DecodeImage(32, crop=ops.RandomResizedCrop(), flip=0.5), workers=2, on_error=on_error
    )
    node.then(ops.Normalize(MEAN, STD, dtype=dtype, layout=layout), backend=backend)
    return made


def delivered(made: pg.Graph) -> list:
    with made.loader() as loader:
        return list(loader)


def assert_same(ours: list, theirs: list) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        assert a["key"] == b["key"]
        assert a["image"].dtype == b["image"].dtype
        assert torch.equal(a["image"], b["image"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("batch", [4, 0])
def test_the_two_in_one_give_the_bytes_of_the_two_apart(dtype, layout, batch):
    fused = graph(dtype=dtype, layout=layout, batch=batch)
    apart = graph("inline", dtype=dtype, layout=layout, batch=batch)
    assert fused.plan().stages["normalize"].within == "decode"
    assert apart.plan().stages["normalize"].within is None
    assert_same(delivered(fused), delivered(apart))


def test_the_plan_says_where_the_work_is_done():
    text = str(graph().plan())
    assert "normalize: its work is done in 'decode', in one go" in text
    assert "delivers: decode" in text


def test_a_state_fits_whether_the_plan_fuses_or_not():
    for first, second in (("thread", "inline"), ("inline", "thread")):
        with graph(first).loader() as loader:
            iterator = iter(loader)
            next(iterator)
            state = json.loads(json.dumps(loader.state_dict()))
            rest = list(iterator)
        with graph(second).loader() as loader:
            loader.load_state_dict(state)
            assert_same(list(loader), rest)


@pytest.mark.parametrize(
    ("what", "build"),
    [
        ("another reader", lambda n: (n, n.then(ops.Normalize(MEAN, STD)))),
        ("a policy of its own", lambda n: (n.then(ops.Normalize(MEAN, STD), on_error=pg.Skip()),)),
        ("completion order", lambda n: (n.then(ops.Normalize(MEAN, STD), workers=2, ordered=False),)),
        ("other channels", lambda n: (n.then(ops.Normalize((0.5,), (0.5,))),)),
    ],
)
def test_they_stay_apart_where_being_one_would_change_something(what, build):
    made = pg.Graph("apart", seed=1)
    decoded = made.add(ops.FromSequence(SAMPLES)).then(ops.Batch(2)).then(ops.DecodeImage(16))
    nodes = build(decoded)
    node = nodes[0].then(ops.Map(lambda batch: batch)) if len(nodes) == 2 else None
    plan = made.plan(made.add(ops.Zip(), nodes[1], node) if node is not None else nodes[0])
    assert all(stage.within is None for stage in plan.stages.values()), what


def test_what_no_process_can_be_sent_is_an_error_that_names_threads():
    made = pg.Graph("locks", seed=3)
    samples = made.add(ops.FromIterable(lambda: [{**SAMPLES[0], "lock": threading.Lock()}]))
    samples.then(ops.Batch(1, collate={"lock": list})).then(ops.DecodeImage(32), workers=5, backend="process")
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        delivered(made)
    assert any("backend='thread'" in each for each in caught.value.__notes__)
