"""What ``DecodeImage`` and ``ListFiles`` refuse, and what they leave alone."""

from __future__ import annotations

import pytest

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
