"""A batch of images in work, and the field of its encoded bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipegraph.chunk import Chunk
from pipegraph.errors import DataError
from pipegraph.operators.images.crop import CropWindow
from pipegraph.operators.images.header import Header

FIELDS = ("image", "jpg", "jpeg", "png", "webp", "bytes")
"""Where encoded bytes are looked for, in this order."""

ImagePart = tuple[Header, CropWindow]


@dataclass(slots=True, eq=False)
class ImageBatch:
    """A batch in work: its slab, the rows to write, and for each row the encoded bytes or, of ``files``, the path."""

    chunk: Chunk
    field: Any
    encoded: list[Any]
    files: bool
    slab: torch.Tensor
    rows: Any
    parts: Sequence[ImagePart | Exception] = ()
    """Of each row what is decoded; empty until a row is done."""
    written: set[int] = field(default_factory=set)
    """The rows whose pixels are there already."""
    beside: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By row: what follows its cut."""


def find_encoded(data: Any, wanted: str | None, output: str) -> tuple[Any, Any]:
    """The field of the encoded bytes, None where the data are the bytes, and what it holds: of a sample or a batch."""
    if isinstance(data, Mapping):
        names = FIELDS if wanted is None else (wanted,)
        for name in names:
            if name in data:
                if name != output and output in data:
                    raise DataError(
                        f"DecodeImage: field {name!r} would be decoded to {output!r}, which is there already; "
                        "choose another name with output=, or rename that first: "
                        f".then(lambda sample: {{'photo': sample.pop({output!r}), **sample}})"
                    )
                return name, data[name]
        hint = "; put Load() before it" if "path" in data else ""
        raise DataError(f"DecodeImage: no field {' or '.join(names)} in {', '.join(map(str, data))}{hint}")
    if isinstance(data, bytes | bytearray | memoryview) or wanted is None:
        return None, data
    raise DataError(f"DecodeImage: field {wanted!r} of a {type(data).__name__}: samples must be dicts")


def with_pixels(data: Any, field: Any, output: str, pixels: torch.Tensor, beside: Mapping[str, Any]) -> Any:
    """The data with pixels, and what follows their cut, in place of the encoded bytes."""
    if field is None:
        return pixels
    made = {name: value for name, value in data.items() if name != field}
    made[output] = pixels
    made.update(beside)
    return made
