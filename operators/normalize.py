"""uint8 images to what a model takes, on whatever device they lie, in one pass.

On the CPU a table of 256 entries per channel is looked up: a uint8 has no more
values, and every result is the correctly rounded one. On other devices it is
one fused multiply-add over the permuted bytes, within two units in the last
place of the table's values.

Legend: N images, H rows, W columns, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from math import inf
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt
import torch

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator, Traits
from pipegraph.errors import DataError, GraphError, MissingExtraError
from pipegraph.integers import amount
from pipegraph.operators.batch_slabs import StageSlabs
from pipegraph.operators.images.header import ImageHWC
from pipegraph.operators.images.regions import Scratch, opencv

Array = npt.NDArray[Any]
Layout = Literal["NCHW", "NHWC"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BITS = {4: torch.int32, 2: torch.int16}
_planes = Scratch()


@final
class Normalize(Operator):
    """Compute ``(image / 255 - mean) / std`` and change dtype and layout, in one pass.

    On the CPU a batch is written into a slab; on another device it is one fused operation on the current stream.

    The input is uint8 (H, W, C) or (N, H, W, C), as a tensor or as the field ``"image"`` of a dict. The result has
    ``dtype`` and ``layout``.

    Args:
        mean, std: one per channel, for values in 0..1, as in torchvision's ``Normalize``.
        dtype: float32, float16 or bfloat16.
        layout: ``"NCHW"`` or ``"NHWC"`` (CHW or HWC on a sample).

    Raises:
        GraphError: ``mean`` and ``std`` differ in length or are for pixels from 0 to 255, or a choice is unknown.
        DataError: while it runs: an image has another dtype, shape or number of channels.
    """

    name = "normalize"
    depends_on = "item"

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        layout: Layout = "NCHW",
    ) -> None:
        if any(isinstance(each, int | float) for each in (mean, std)) or not 0 < len(mean) == len(std):
            raise GraphError(
                f"Normalize: mean and std need one value per channel, such as (0.5,), got {mean} and {std}"
            )
        for value in (*mean, *std):
            amount(value, "Normalize: each mean and std", -inf, GraphError)
        if not all(value > 0 for value in std):
            raise GraphError(f"Normalize: every std must be > 0, got {std}")
        if any(not -inf < value <= 1 for value in (*mean, *std)):
            raise GraphError(
                "Normalize: mean and std are of values in 0..1, as torchvision's; divide those of pixels from 0 to 255 "
                f"by 255, got {mean} and {std}"
            )
        if dtype not in DTYPES:
            raise GraphError(f"Normalize: dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
        if layout not in ("NCHW", "NHWC"):
            raise GraphError(f"Normalize: layout must be 'NCHW' or 'NHWC', got {layout!r}")
        self.mean, self.std = tuple(mean), tuple(std)
        self.dtype = dtype
        self.layout = layout
        self._slabs: StageSlabs

    @property
    def traits(self) -> Traits:
        return Traits(slabs=True)

    def config(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std, "dtype": str(self.dtype), "layout": self.layout}

    def open(self, context: Context) -> None:
        self._slabs = StageSlabs(context)

    def _image_of(self, data: Any, dims: int) -> torch.Tensor:
        image = data.get("image") if isinstance(data, dict) else data
        if not isinstance(image, torch.Tensor):
            got = f"fields {', '.join(map(str, data))}" if isinstance(data, dict) else type(data).__name__
            raise DataError(f"Normalize: a tensor, or a field 'image' that is one, is needed, got {got}")
        channels = len(self.mean)
        if image.dtype != torch.uint8 or image.dim() != dims or image.shape[-1] != channels:
            raise DataError(
                f"Normalize: uint8 {'N' if dims == 4 else ''}HWC images of {channels} channels are needed, "
                f"got {image.dtype} of shape {tuple(image.shape)}"
            )
        return image

    def shape_of(self, height: int, width: int) -> tuple[int, ...]:
        """Of one image of this size."""
        channels = len(self.mean)
        return (channels, height, width) if self.layout == "NCHW" else (height, width, channels)

    def process(self, chunk: Chunk) -> Chunk:
        """A batch is written into a slab, where it lies in the CPU's memory."""
        images = self._image_of(chunk.data, 4 if chunk.batched else 3)
        images = images if chunk.batched else images[None]
        count, height, width, _ = images.shape
        shape = (count, *self.shape_of(height, width))
        chunk.keys = chunk.own_keys
        if not chunk.batched or images.device.type != "cpu":
            out = torch.empty(shape, dtype=self.dtype, device=images.device)
            normalize_into(images, self.mean, self.std, out, self.layout)
            chunk.data = _with_image(chunk.data, out if chunk.batched else out[0])
            return chunk
        nbytes = images.numel() * self.dtype.itemsize
        slab = self._slabs.take(nbytes, chunk.data)
        normalize_into(images, self.mean, self.std, slab[:nbytes].view(self.dtype).view(shape), self.layout)
        out, lease = self._slabs.deliver(slab, self.dtype, shape)
        chunk.data = _with_image(chunk.data, out)
        self._slabs.pack(chunk, lease, out)
        return chunk


def _with_image(data: Any, image: torch.Tensor) -> Any:
    return {**data, "image": image} if isinstance(data, dict) else image


def normalize_into(
    images_NHWC: torch.Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    out: torch.Tensor,
    layout: Layout = "NCHW",
) -> None:
    """Write ``(images / 255 - mean) / std`` to ``out``, on the same device; on CUDA's current stream, without waiting.

    ``out`` is (N, C, H, W), contiguous or channels_last, for layout ``"NCHW"``, else (N, H, W, C).
    """
    if images_NHWC.device.type != "cpu":
        scale, bias = _affine(tuple(mean), tuple(std), images_NHWC.device)
        target = out if layout == "NHWC" else out.permute(0, 2, 3, 1)
        torch.addcmul(bias, images_NHWC, scale, out=target)
        return
    bits = out.view(_BITS[out.element_size()])
    if layout == "NCHW" and not bits.is_contiguous():
        bits, layout = bits.permute(0, 2, 3, 1), "NHWC"
    fill = row_filler(mean, std, out.dtype, layout)
    for image_HWC, target_bits in zip(images_NHWC.numpy(), bits.numpy(), strict=True):
        fill(image_HWC, target_bits)


def row_filler(
    mean: Sequence[float], std: Sequence[float], dtype: torch.dtype, layout: Layout
) -> Callable[[ImageHWC, Array], None]:
    """A function that normalises one uint8 (H, W, C) image into memory of its own, on any thread.

    Its target is (C, H, W) for layout ``"NCHW"``, else (H, W, C), of the integers of ``bits_of(dtype)``.
    """
    tables = tables_of(tuple(mean), tuple(std), dtype)
    return partial(_fill_planes if layout == "NCHW" else _fill_pixels, tables)


def bits_of(dtype: torch.dtype) -> npt.DTypeLike:
    """The integers that have the bits of ``dtype``: NumPy has no bfloat16."""
    return np.int32 if dtype.itemsize == 4 else np.int16


@cache
def _cv2() -> Any:
    """OpenCV, whose look-up is twice as fast as NumPy's; ``None`` where it is not installed."""
    try:
        return opencv()
    except MissingExtraError:
        return None


def _fill_planes(tables: Array, image_HWC: ImageHWC, out_CHW: Array) -> None:
    height, width, channels = image_HWC.shape
    cv2 = _cv2()
    if cv2 is None:
        for channel, table in enumerate(tables):
            np.take(table, image_HWC[:, :, channel], out=out_CHW[channel], mode="clip")
        return
    count = channels * height * width
    planes = tuple(_planes.take(count)[:count].reshape(channels, height, width))
    cv2.split(image_HWC, planes)
    for plane, table, target in zip(planes, tables, out_CHW, strict=True):
        cv2.LUT(plane, table, dst=target)


def _fill_pixels(tables: Array, image_HWC: ImageHWC, out_HWC: Array) -> None:
    cv2 = _cv2()
    if cv2 is None:
        for channel, table in enumerate(tables):
            out_HWC[:, :, channel] = table[image_HWC[:, :, channel]]
        return
    cv2.LUT(image_HWC, np.ascontiguousarray(tables.T)[None], dst=out_HWC)


@lru_cache(maxsize=16)
def tables_of(mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype) -> Array:
    """(C, 256), of the integers of ``bits_of(dtype)``: what each level becomes."""
    values = torch.arange(256, dtype=torch.float64) / 255
    mean_64, std_64 = torch.tensor((mean, std), dtype=torch.float64)[..., None]
    table: torch.Tensor = ((values - mean_64) / std_64).to(dtype)
    return table.view(_BITS[table.element_size()]).numpy()


@lru_cache(maxsize=16)
def _affine(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and bias, (C,) float32 each, on ``device``."""
    mean_64, std_64 = torch.tensor((mean, std), dtype=torch.float64)
    return (1 / (255 * std_64)).float().to(device), (-mean_64 / std_64).float().to(device)
