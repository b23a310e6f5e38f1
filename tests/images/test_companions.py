"""Masks, boxes and keypoints follow an image's crop and flip; the region drawn is a field."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError
from pipegraph.testing import assert_resumes_exactly, assert_same_everywhere

HEIGHT, WIDTH = 60, 80


def png(array, mode=None, **options):
    file = io.BytesIO()
    image = Image.fromarray(array)
    if mode == "P":
        image = Image.fromarray(array, "L")
        image.putpalette([255 - i // 3 for i in range(768)])
    image.save(file, "png", **options)
    return file.getvalue()


def sample(number=0):
    """An image whose pixels say where they are: red the row, green the column; the mask is red and green mixed."""
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    image = np.stack([rows * 4, columns * 3, np.full_like(rows, number)], -1).astype(np.uint8)
    mask = ((rows // 10) * 8 + columns // 10).astype(np.uint8)
    return {
        "png": png(image),
        "mask": png(mask, "P"),
        "depth": mask.astype(np.int64) * 1000,
        "boxes": [[10.0, 5.0, 30.0, 25.0], [0.0, 0.0, 80.0, 60.0]],
        "points": np.array([[10.0, 5.0], [79.0, 59.0], [40.0, 30.0]], np.float32),
        "key": f"k{number}",
    }


def decoder(crop=None, flip=0.0, size=(60, 80), **options):
    options = {
        "masks": ["mask", "depth"],
        "boxes": "boxes",
        "keypoints": "points",
        "region": "cut",
        **options,
    }
    return ops.DecodeImage(size, crop=crop, flip=flip, interpolation="nearest", **options)


def decoded(operator, items=None, batch=None):
    graph = pg.Graph("g", seed=5)
    node = graph.add(ops.FromSequence(items or [sample(i) for i in range(12)]))
    if batch:
        node = node.then(ops.Map(lambda s: {k: v for k, v in s.items() if k != "depth"})).then(
            ops.Batch(batch)
        )
    node.then(operator, name="decode")
    with graph.loader() as loader:
        return list(loader)


@pytest.mark.parametrize("flip", [0.0, 0.5])
@pytest.mark.parametrize("crop", [ops.RandomResizedCrop(scale=(0.2, 0.8)), ops.CenterCrop(60)], ids=repr)
def test_pixels_masks_and_points_agree_wherever_the_crop_lies(crop, flip):
    for found in decoded(decoder(crop, flip, size=(50, 50))):
        cut, image, mask = found["cut"], found["image"].numpy().astype(int), found["mask"].numpy().astype(int)
        rows, columns = image[..., 0] / 4, image[..., 1] / 3
        # The mask was drawn of the same coordinates: it says the same, but for one pixel at the edges of its tiles.
        near = np.zeros_like(mask, bool)
        for dr in (-1, 0, 1):
            for dc in (-1, 0, 1):
                tile = ((rows + dr) // 10) * 8 + (columns + dc) // 10
                near |= tile == mask
        assert near.all()
        for (x, y), (moved_x, moved_y) in zip(sample()["points"], found["points"].tolist(), strict=True):
            share = (x - cut["left"]) / cut["width"]
            assert moved_x == pytest.approx(50 * (1 - share if cut["flip"] else share), abs=1e-3)
            assert moved_y == pytest.approx(50 * (y - cut["top"]) / cut["height"], abs=1e-3)
        boxes = found["boxes"]
        assert (boxes[:, :2] <= boxes[:, 2:]).all() and boxes.min() >= 0 and boxes.max() <= 50
        assert boxes[1].tolist() == [0, 0, 50, 50]  # the whole image covers every crop


def test_on_batches_they_are_the_same_as_on_samples():
    crop = ops.RandomResizedCrop(scale=(0.3, 0.9))
    options = {"masks": "mask"}
    alone = decoded(decoder(crop, 0.5, (32, 40), **options))
    (batch,) = decoded(decoder(crop, 0.5, (32, 40), **options), batch=12)
    assert batch["image"].shape == (12, 32, 40, 3) and batch["mask"].shape == (12, 32, 40)
    assert batch["points"].shape == (12, 3, 2) and len(batch["boxes"]) == 12
    assert batch["cut"]["top"].shape == (12,) and batch["cut"]["flip"].dtype == torch.bool
    for i, one in enumerate(alone):
        for name in ("image", "mask", "boxes", "points"):
            assert torch.equal(batch[name][i], one[name]), name
        assert {k: v[i].item() for k, v in batch["cut"].items()} == one["cut"]


def whole(batch=5):
    def make():
        graph = pg.Graph("g", seed=5)
        node = graph.add(ops.FromSequence([sample(i) for i in range(8)])).then(
            ops.Map(lambda s: {k: v for k, v in s.items() if k != "depth"})
        )
        node.then(ops.Batch(batch)).then(
            decoder(ops.RandomResizedCrop(), 0.5, (16, 16), masks="mask"), name="decode", workers=2
        )
        return graph

    return make


def test_they_resume_exactly_and_are_the_same_everywhere():
    assert_resumes_exactly(whole())
    assert_same_everywhere(whole())


def test_a_row_that_fails_is_left_out_of_all_fields():
    items = [sample(i) for i in range(6)]
    items[2] = {**items[2], "mask": png(np.zeros((5, 5), np.uint8))}
    for each in items:
        del each["depth"]
    graph = pg.Graph("g", seed=5)
    graph.add(ops.FromSequence(items)).then(ops.Batch(6)).then(
        decoder(masks="mask"), name="decode", on_error=pg.Skip(1)
    )
    with graph.loader() as loader:
        (batch,) = loader
        (lost,) = loader.profile().quarantined
    assert lost.key == "k2" and "mask 'mask' is 5x5 pixels high and wide, its image 60x80" in str(lost.error)
    assert len(batch["image"]) == len(batch["mask"]) == len(batch["boxes"]) == len(batch["cut"]["top"]) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": png(np.zeros((60, 80, 3), np.uint8))}, "mask 'mask' is RGB, and a mask has one channel"),
        ({"mask": b"no image"}, "image"),
        ({"mask": "text"}, "mask 'mask' must be an encoded image or an array, got str"),
        ({"mask": np.zeros((60, 80))}, "must be .height, width. of whole numbers, got float64"),
        ({"mask": np.zeros((60, 80, 1), np.uint8)}, "must be .height, width. of whole numbers"),
        ({"boxes": [1, 2, 3, 4]}, "field 'boxes': boxes must be .n, 4."),
        ({"boxes": np.zeros((2, 5))}, r"field 'boxes': boxes must be .n, 4.*got ndarray of shape \(2, 5\)"),
        ({"boxes": "text"}, "field 'boxes': boxes must be"),
        ({"points": [[1, 2, 3]]}, "field 'points': keypoints must be"),
    ],
)
def test_what_cannot_follow_is_named(change, message):
    with pytest.raises(DataError, match=message):
        decoded(decoder(), [{**sample(), **change}])
    with pytest.raises(DataError, match="no field 'mask' in"):
        decoded(decoder(masks="mask"), [{"png": sample()["png"]}])
