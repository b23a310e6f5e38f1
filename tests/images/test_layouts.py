"""``ToLayout`` knows how the images lie that it is given; ``Normalize``, ``ToDtype`` and it say what they lack."""

import math

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError

PIXELS = torch.arange(2 * 5 * 7 * 3).remainder(256).to(torch.uint8).view(2, 5, 7, 3)


def made_of(samples, *steps):
    graph = pg.Graph("layouts")
    node = graph.add(ops.FromSequence(samples))
    for step in steps:
        node = node.then(step)
    with graph.loader() as loader:
        return next(iter(loader))


def normalized(layout="NCHW"):
    return ops.Normalize((0.5,) * 3, (0.5,) * 3, layout=layout)


EXPECTED = ((PIXELS.double() / 255 - 0.5) / 0.5).float().permute(0, 3, 1, 2)

ABOVE = {
    "Normalize": lambda: [ops.Batch(2), normalized()],
    "Normalize to NHWC": lambda: [ops.Batch(2), normalized("NHWC")],
    "Normalize of samples": lambda: [normalized(), ops.Batch(2)],
    "ToDtype between": lambda: [ops.Batch(2), normalized(), ops.ToDtype(torch.float32)],
    "a copy between": lambda: [ops.Batch(2), normalized(), ops.Pin(), ops.CopyToDevice("cpu", copy=True)],
    "Shuffle and Unbatch between": lambda: [ops.Batch(2), normalized(), ops.Unbatch(), ops.Shuffle(1), ops.Batch(2)],
    "ToLayout NCHW": lambda: [ops.Batch(2), normalized("NHWC"), ops.ToLayout("NCHW")],
    "ToLayout channels_last": lambda: [ops.Batch(2), normalized("NHWC"), ops.ToLayout("channels_last")],
    "ToLayout twice": lambda: [ops.Batch(2), normalized(), ops.ToLayout("NHWC"), ops.ToLayout("NCHW")],
    "ToLayout and ToDtype": lambda: [
        ops.Batch(2), normalized("NHWC"), ops.ToLayout("NCHW"), ops.ToDtype(torch.float32),
    ],
}  # fmt: skip


@pytest.mark.parametrize("layout", ["NCHW", "channels_last", "NHWC"])
@pytest.mark.parametrize("above", ABOVE)
def test_a_layout_is_made_from_the_one_that_is_there(above, layout):
    batch = made_of(list(PIXELS), *ABOVE[above](), ops.ToLayout(layout))
    expected = EXPECTED.permute(0, 2, 3, 1) if layout == "NHWC" else EXPECTED
    assert torch.allclose(batch, expected, atol=1e-6)
    kept = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    assert batch.is_contiguous(memory_format=kept)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ops.ToDtype("float32"),
            "ToDtype: dtype must be a torch.dtype such as torch.float32, got 'float32'",
        ),
        (lambda: ops.ToDtype(float), "ToDtype: dtype must be a torch.dtype such as .*, got <class 'float'>"),
        (lambda: ops.Normalize(["a"], ["b"]), "Normalize: each mean and std must be a number, got 'a'"),
        (
            lambda: ops.Normalize([math.nan] * 3, [1] * 3),
            "Normalize: each mean and std must be a number, got nan",
        ),
        (lambda: ops.Normalize([-math.inf] * 3, [1] * 3), "Normalize: each mean and std must be finite, got"),
    ],
)
def test_what_no_image_can_be_made_with_is_refused_at_once(make, message):
    with pytest.raises(GraphError, match=message):
        make()
