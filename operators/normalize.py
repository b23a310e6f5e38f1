"""uint8 images to what a model takes: ``Normalize``, ``ToLayout``, ``ToDtype``. On whatever device they lie."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, final

import torch

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator, Source, Traits
from pipegraph.errors import DataError, GraphError
from pipegraph.integers import flag
from pipegraph.operators.batch_slabs import StageSlabs
from pipegraph.operators.images.normalize_tables import Layout, check_normalisation, normalize_into


def _image_of(data: Any, what: str) -> torch.Tensor:
    image = data.get("image") if isinstance(data, dict) else data
    if not isinstance(image, torch.Tensor):
        got = f"fields {', '.join(map(str, data))}" if isinstance(data, dict) else type(data).__name__
        raise DataError(f"{what}: a tensor, or a field 'image' that is one, is needed, got {got}")
    return image


def _with_image(data: Any, image: torch.Tensor) -> Any:
    return {**data, "image": image} if isinstance(data, dict) else image


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
        return Traits(slabs=True, images=self.layout)

    def config(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std, "dtype": str(self.dtype), "layout": self.layout}

    def open(self, context: Context) -> None:
        self._slabs = StageSlabs(context)

    def _check(self, image: torch.Tensor, dims: int) -> torch.Tensor:
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
        found = _image_of(chunk.data, "Normalize")
        images = self._check(found, 4 if chunk.batched else 3)
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


@final
class ToDtype(Operator):
    """Images to another dtype; from uint8 to floats also from 0..255 to 0..1.

    Args:
        dtype: of the result.
        scale: whether uint8 is divided by 255.

    Raises:
        GraphError: ``dtype`` is no ``torch.dtype``.
        DataError: while it runs: an item that is no tensor and has no field ``"image"``.
    """

    traits = Traits(images="same")
    depends_on = "item"

    def __init__(self, dtype: torch.dtype, scale: bool = True) -> None:
        if not isinstance(dtype, torch.dtype):
            raise GraphError(f"ToDtype: dtype must be a torch.dtype such as torch.float32, got {dtype!r}")
        self.dtype = dtype
        self.scale = flag(scale, "ToDtype: scale")

    def config(self) -> dict[str, Any]:
        return {"dtype": str(self.dtype), "scale": self.scale}

    def process(self, chunk: Chunk) -> Chunk:
        image = _image_of(chunk.data, "ToDtype")
        scaled = self.scale and image.dtype == torch.uint8 and self.dtype.is_floating_point
        if image.dtype != self.dtype:
            made = torch.empty_like(image, dtype=self.dtype)
            if scaled:
                torch.div(image, torch.tensor(255, dtype=self.dtype), out=made)
            else:
                made.copy_(image)
            image = made
        chunk.keys = chunk.own_keys
        chunk.data = _with_image(chunk.data, image)
        return chunk


@final
class ToLayout(Operator):
    """Images to another layout, contiguous.

    They come in the layout of the ``Normalize`` or ``ToLayout`` above, where nothing but ``ToDtype``, ``Shuffle``,
    ``Batch``, ``Unbatch``, ``Pin`` or ``CopyToDevice`` is between; else they are HWC.

    Args:
        layout: ``"NCHW"``, ``"NHWC"``, or ``"channels_last"`` (NCHW in shape, NHWC in memory: from HWC no copy).

    Raises:
        GraphError: ``layout`` is another.
        DataError: while it runs: an item that is no tensor and has no field ``"image"``, or has too few dimensions.
    """

    depends_on = "item"

    def __init__(self, layout: str) -> None:
        if layout not in ("NCHW", "NHWC", "channels_last"):
            raise GraphError(f"ToLayout: layout must be 'NCHW', 'NHWC' or 'channels_last', got {layout!r}")
        self.layout = layout
        self._planes = False  # whether images come with the channels first

    def config(self) -> dict[str, Any]:
        return {"layout": self.layout}

    @property
    def traits(self) -> Traits:
        return Traits(images=self.layout, bind=self._bound)

    def _bound(self, upstream: Sequence[Operator | Source], images: str | None) -> Operator:
        bound = copy.copy(self)
        bound._planes = images not in (None, "NHWC")
        return bound

    def process(self, chunk: Chunk) -> Chunk:
        image = _image_of(chunk.data, "ToLayout")
        if image.dim() < 3 + chunk.batched:
            raise DataError(
                f"ToLayout: images are HWC, in batches NHWC, got shape {tuple(image.shape)}; give grey images a "
                "channel: image[..., None]"
            )
        planes = self._planes
        if planes and self.layout != "NCHW":
            image, planes = image.movedim(-3, -1).contiguous(), False
        if not planes and self.layout != "NHWC":
            image = image.movedim(-1, -3)
        chunk.keys = chunk.own_keys
        chunk.data = _with_image(chunk.data, image.contiguous() if self.layout == "NCHW" else image)
        return chunk
