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
