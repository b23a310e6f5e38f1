"""What ``DecodeImage`` and ``ListFiles`` refuse, and what they leave alone."""

from __future__ import annotations

import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": ops.RandomResizedCrop}, r"crop must be .*did you mean ops\.RandomResizedCrop\(\)"),
        ({"crop": ops.CenterCrop}, r"did you mean ops\.CenterCrop\(\)"),
        ({"crop": "center"}, r"crop must be ops\.RandomResizedCrop\(\.\.\.\), .* got 'center'"),
        ({"crop": 224}, "crop must be .* got 224"),
        ({"size": 32.0}, r"size must be an int or \(height, width\) >= 1, got 32\.0"),
        ({"size": "32"}, "size must be an int .* got '32'"),
        ({"size": None}, "size must be an int .* got None"),
        ({"size": (32, 32.0)}, "size must be an int"),
        ({"field": 3}, "field must be a field's name or None, got 3"),
        ({"flip": "yes"}, "flip is a probability in 0..1, got 'yes'"),
    ],
)
def test_wrong_arguments_are_refused_where_they_are_given(options, message):
    with pytest.raises(pg.errors.GraphError, match=message):
        ops.DecodeImage(**{"size": 32, **options})


@pytest.mark.parametrize("value", [256.5, "256", None, True])
def test_a_central_crop_wants_whole_pixels(value):
    with pytest.raises(pg.errors.GraphError, match=r"CenterCrop: resize must be an int >= 1"):
        ops.CenterCrop(value)


@pytest.mark.parametrize("value", [0.5, (0.5,), ("a", "b"), None])
def test_a_random_crop_wants_pairs_of_numbers(value):
    for name in ("scale", "ratio"):
        with pytest.raises(
            pg.errors.GraphError, match=f"RandomResizedCrop: {name} must be a pair of numbers"
        ):
            ops.RandomResizedCrop(**{name: value})


@pytest.mark.parametrize("batched", [False, True])
def test_a_second_decoding_does_not_overwrite_the_first_ones_image(encode, make_scene, batched):
    sample = {"jpg": encode(make_scene(40, 40)), "mask": encode(make_scene(40, 40, 1))}

    def delivered(*between):
        graph = pg.Graph("two")
        node = graph.add(ops.FromIterable([sample] * 2))
        node = node.then(ops.Batch(2)) if batched else node
        for stage in (ops.DecodeImage(8), *between, ops.DecodeImage(8, field="mask", mode="L")):
            node = node.then(stage)
        with graph.loader() as loader:
            return next(iter(loader))

    with pytest.raises(
        pg.errors.DataError, match=r"'mask' would be decoded to 'image', which is there already"
    ):
        delivered()
    both = delivered(lambda found: {"photo": found.pop("image"), **found})
    assert both["photo"].shape[-1] == 3 and both["image"].shape[-1] == 1
    assert not torch.equal(both["photo"][..., :1], both["image"])


def test_a_pattern_with_folders_is_matched_against_the_path(tmp_path):
    for name in ("a.jpg", "train/b.jpg", "train/cat/c.JPG", "val/d.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    def found(pattern):
        graph = pg.Graph("patterns")
        graph.add(ops.ListFiles(tmp_path, pattern, classes=False))
        with graph.loader() as loader:
            return {sample["key"] for sample in loader}

    assert found("**/*.jpg") == found("*.jpg") == {"a.jpg", "train/b.jpg", "train/cat/c.JPG", "val/d.jpg"}
    assert found("train/*.jpg") == {"train/b.jpg", "train/cat/c.JPG"}
    assert found("**/cat/*.jpg") == {"train/cat/c.JPG"}
