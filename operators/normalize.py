"""uint8 images to what a model takes, on whatever device they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator, Traits
from pipegraph.errors import DataError
from pipegraph.operators.batch_slabs import StageSlabs
from pipegraph.operators.images.normalize_tables import Layout, check_normalisation, normalize_into


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
        check_normalisation(mean, std, dtype, layout)
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
