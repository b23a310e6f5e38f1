"""Masks, boxes and keypoints that follow an image's crop. Pure.

Coordinates are continuous: 0 is the left (upper) edge of the first pixel of the oriented image, its width (height) the
right (lower) edge of the last.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from pipegraph.errors import DataError, DecodeError, GraphError, shown
from pipegraph.operators.images.crop import CropWindow, oriented
from pipegraph.operators.images.header import check_size, pillow, probe

_ONE_CHANNEL = {"1": np.uint8, "L": np.uint8, "P": np.uint8, "I;16": np.int32, "I": np.int32}
"""Modes of Pillow in which a pixel is one number, and the dtype in which that is delivered."""


class Rectangle(NamedTuple):
    """The part of the oriented image that fills the output, in pixels and fractions of them."""

    top: float
    left: float
    height: float
    width: float


def rectangle(cut: CropWindow) -> Rectangle:
    """What a cut shows."""
    top, left, height, width = cut.region
    box = cut.box
    if box is None:
        return Rectangle(top, left, height, width)
    return Rectangle(top + box.top, left + box.left, box.bottom - box.top, box.right - box.left)


def mask_of(
    value: Any, field: str, image: tuple[int, int], cut: CropWindow, size: tuple[int, int]
) -> torch.Tensor:
    """(height, width) of ``size``: the mask's value at the pixel that lies at each output pixel's centre.

    ``image`` is the size of the oriented image, which the mask has too; palette indices stay as they are.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        mask = _decoded(value, field)
    elif isinstance(value, np.ndarray | torch.Tensor):
        mask = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        mask = mask if mask.dtype.isnative else mask.astype(mask.dtype.newbyteorder("="))
        mask = mask.astype(np.int32) if mask.dtype == np.uint16 else mask
    else:
        raise DataError(
            f"DecodeImage: mask {field!r} must be an encoded image or an array, got {type(value).__name__}"
        )
    if mask.ndim != 2 or mask.dtype.kind not in "bui":
        raise DataError(
            f"DecodeImage: mask {field!r} must be (height, width) of whole numbers, got {mask.dtype} {mask.shape}"
        )
    if mask.shape != image:
        raise DataError(
            f"DecodeImage: mask {field!r} is {mask.shape[0]}x{mask.shape[1]} pixels high and wide, its image "
            f"{image[0]}x{image[1]}; scale it in a Map before"
        )
    part = rectangle(cut)
    rows = _nearest(part.top, part.height, size[0], image[0])
    columns = _nearest(part.left, part.width, size[1], image[1])
    return torch.from_numpy(mask[rows[:, None], columns[::-1] if cut.flip else columns])


def _nearest(start: float, extent: float, count: int, end: int) -> Any:
    """The pixels in which ``count`` equal parts of ``start .. start + extent`` have their centres."""
    found = np.floor(start + (np.arange(count) + 0.5) * (extent / count)).astype(np.int64)
    return found.clip(0, end - 1)


def _decoded(data: Any, field: str) -> Any:
    header = probe(data)
    images = pillow("decoding masks")
    try:
        image = images.open(io.BytesIO(data))
        check_size(*image.size)
        dtype = _ONE_CHANNEL.get("I;16" if image.mode.startswith("I;16") else image.mode)
        pixels = None if dtype is None else np.asarray(image).astype(dtype)
    except (DecodeError, MemoryError):
        raise
    except Exception as error:
        raise DecodeError(f"mask {field!r} cannot be decoded: {error}") from error
    if pixels is None:
        raise DataError(
            f"DecodeImage: mask {field!r} is {image.mode}, and a mask has one channel; change it before, for example "
            "to class numbers"
        )
    return oriented(pixels, header.orientation)


def boxes_of(value: Any, field: str, cut: CropWindow, size: tuple[int, int]) -> torch.Tensor:
    """float32 (n, 4), left, top, right, bottom in pixels of the output; what lies outside of it is cut off.

    A box that lies outside altogether stays, without area, so that labels beside it keep their places.
    """
    boxes = _points(value, field, 4, "boxes must be (n, 4): left, top, right, bottom")
    boxes = _moved(boxes.reshape(-1, 2, 2), cut, size)
    if cut.flip:
        boxes[:, :, 0] = boxes[:, ::-1, 0]  # left and right change places
    limits = np.array([size[1], size[0]], np.float32)
    return torch.from_numpy(np.ascontiguousarray(boxes.clip(0, limits).reshape(-1, 4)))


def keypoints_of(value: Any, field: str, cut: CropWindow, size: tuple[int, int]) -> torch.Tensor:
    """float32 (..., 2), x and y in pixels of the output, also of those outside of it."""
    return torch.from_numpy(_moved(_points(value, field, 2, "keypoints must be (..., 2): x, y"), cut, size))


def _points(value: Any, field: str, last: int, what: str) -> Any:
    try:
        plain = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        found = np.array(plain, np.float32)
    except (TypeError, ValueError):
        found = np.zeros(1, np.float32)
    if found.size == 0 and found.ndim == 1:
        found = found.reshape(0, last)
    if found.ndim < 2 or found.shape[-1] != last or (last == 4 and found.ndim != 2):
        shape = f" of shape {tuple(np.shape(value))}" if hasattr(value, "shape") else ""
        raise DataError(f"DecodeImage: field {field!r}: {what}, got {type(value).__name__}{shape}")
    return found


def _moved(points: Any, cut: CropWindow, size: tuple[int, int]) -> Any:
    part = rectangle(cut)
    x = (points[..., 0] - part.left) * (size[1] / part.width)
    y = (points[..., 1] - part.top) * (size[0] / part.height)
    return np.stack([size[1] - x if cut.flip else x, y], -1).astype(np.float32)


@dataclass(frozen=True)
class Companions:
    """Which fields follow an image, by kind, and the name of a field that says what was cut out."""

    masks: tuple[str, ...] = ()
    boxes: tuple[str, ...] = ()
    keypoints: tuple[str, ...] = ()
    region: str | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """All that are read."""
        return (*self.masks, *self.boxes, *self.keypoints)

    def __bool__(self) -> bool:
        return bool(self.fields) or self.region is not None

    def of(
        self, sample: Mapping[str, Any], image: tuple[int, int], cut: CropWindow, size: tuple[int, int]
    ) -> dict[str, Any]:
        """Their values for one image of (height, width) ``image``."""
        made: dict[str, Any] = {name: mask_of(sample[name], name, image, cut, size) for name in self.masks}
        made |= {name: boxes_of(sample[name], name, cut, size) for name in self.boxes}
        made |= {name: keypoints_of(sample[name], name, cut, size) for name in self.keypoints}
        if self.region is not None:
            part = rectangle(cut)
            made[self.region] = {
                **{name: float(value) for name, value in part._asdict().items()},
                "flip": cut.flip,
                "image_height": image[0],
                "image_width": image[1],
            }
        return made


def names_of(value: str | Sequence[str], what: str) -> tuple[str, ...]:
    """Names of fields, one or several."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise GraphError(f"DecodeImage: {what} must be a field's name or a list of them, got {shown(value)}")
    return tuple(names)
