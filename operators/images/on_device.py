"""JPEGs decoded on a device: by nvImageCodec, then cropped, resized, flipped and normalised by torch's operators.

The decoder writes each image's region to memory of its own. Images of similar size are laid side by side with one
gather, and resized by two batched matrix products, one per axis, whose weights are Pillow's filters: widened by the
scale, so antialiased. A flip or an EXIF orientation is an axis read backwards, or the two axes exchanged.

On a GPU the decoder is nvJPEG (the JPEG engine where there is one). On other devices nvImageCodec decodes on the CPU.

Legend: N images, Y and X rows and columns as stored, A and B those of the output, C channels.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context
from pipegraph.device.backend import sent, slots_on
from pipegraph.device.copy import Arrival
from pipegraph.errors import MissingExtraError
from pipegraph.operators.images.crop import STEPS, Box, stored_region
from pipegraph.operators.images.header import Interpolation, pillow
from pipegraph.operators.images.image_batch import ImagePart
from pipegraph.operators.images.regions import cpu_decoder, nvimgcodec_module, parameters
from pipegraph.operators.normalize import Normalize, normalize_into
from pipegraph.operators.to_device import Landings

GROUP_PIXELS = 1 << 23
"""Pixels that are resized together, padded: some 200 MB of temporary memory on the device."""

GROUP_SIDES = 1.5
"""The longest side among images that are resized together, over that of the smallest of them."""


def _cubic(x: torch.Tensor) -> torch.Tensor:
    x = x.abs()
    far = ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, far * (x < 2))


_FILTERS: dict[Interpolation, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: (1 - x.abs()).clamp_(min=0),
    "cubic": _cubic,
    "area": lambda x: ((x > -0.5) & (x <= 0.5)).float(),
}
_FILTERS |= {"antialias": _FILTERS["linear"], "nearest": _FILTERS["area"]}


class _Axis(NamedTuple):
    """Of one image: where the output begins and how far it extends along a stored axis, in pixels of the region."""

    start: float
    extent: float

    def reversed(self, length: int) -> _Axis:
        return _Axis(length - self.start, -self.extent)


class _Decoded(NamedTuple):
    """The region of one image, which part of it fills its row of the batch, and what the device may still read."""

    row: int
    source: tuple[Any, ...]
    pixels: torch.Tensor
    swapped: bool
    axes: tuple[_Axis, _Axis]

    @property
    def side(self) -> int:
        return max(self.pixels.shape[:2])


class DeviceDecoder:
    """Decodes batches on a device, into slabs there, on the stage's own stream; for one worker.

    It has the methods of ``StageSlabs``. The other tensors of a batch are copied to the device too.
    """

    def __init__(
        self,
        device: torch.device,
        context: Context,
        size: tuple[int, int],
        channels: int,
        interpolation: Interpolation,
        normalize: Normalize | None,
    ) -> None:
        self._decoder = _decoder(device)
        self._nv = nvimgcodec_module()
        self._parameters = parameters(self._nv)[channels]
        self._landings = Landings(slots_on([device]), context)
        self._landing = self._landings.landing(0)
        self._context = context
        self._device, self._size, self._channels = device, size, channels
        self._nearest, self._filter = interpolation == "nearest", _FILTERS[interpolation]
        self._normalize = normalize

    def writing(self) -> AbstractContextManager[object]:
        """Makes the stage's stream the current one."""
        return self._landing.backend.use(self._landing.stream)

    # -- decoding ------------------------------------------------------------------------------

    def decode(
        self, encoded: Sequence[Any], parts: Sequence[ImagePart | Exception], rows: torch.Tensor
    ) -> list[Any]:
        """Write what is decoded on the device to its row; returns what is left to others, None for each row written."""
        left = list(encoded)
        with torch.no_grad(), self.writing():
            found = list(self._regions(encoded, parts))
            for group in _groups(found):
                self._resize(group, rows)
        self._landing.hold(self._landing.stream.record_event(), found)
        for image in found:
            left[image.row] = None
        return left

    def _regions(self, encoded: Sequence[Any], parts: Sequence[ImagePart | Exception]) -> Iterator[_Decoded]:
        wanted = [
            (row, part)
            for row, part in enumerate(parts)
            if not isinstance(part, Exception)
            and part[0].format == "JPEG"
            and part[0].plain
            and part[0].complete
        ]
        streams = []
        for row, (header, window) in wanted:
            top, left, height, width = stored_region(window.region, header.orientation, *header.size)
            whole = self._nv.CodeStream(bytes(encoded[row]))
            streams.append(
                whole.get_sub_code_stream(0, self._nv.Region(top, left, top + height, left + width))
            )
        queue = getattr(getattr(self._landing.stream, "raw", None), "cuda_stream", 0)
        images = self._decoder.decode(streams, params=self._parameters, cuda_stream=queue) if streams else []
        for (row, part), stream, image in zip(wanted, streams, images, strict=True):
            if image is not None:
                on_device = image.buffer_kind == self._nv.ImageBufferKind.STRIDED_DEVICE
                pixels = from_dlpack(image) if on_device else torch.from_numpy(np.asarray(image))
                swapped, axes = _placed(part)
                yield _Decoded(row, (encoded[row], stream), pixels, swapped, axes)

    def _resize(self, group: Sequence[_Decoded], rows: torch.Tensor) -> None:
        device = self._device
        flat = sent(torch.cat([image.pixels.reshape(-1, self._channels) for image in group]), device)
        sizes = torch.tensor([image.pixels.shape[:2] for image in group], device="cpu")
        ends = sizes.prod(1).cumsum(0)
        indices = torch.tensor([image.row for image in group], device="cpu")
        numbers = sent(torch.stack([indices, ends - sizes.prod(1), *sizes.T]), device)
        row, offset, height, width = numbers[..., None]  # (N, 1) each
        axes = sent(torch.tensor([image.axes for image in group], device="cpu"), device)
        y = torch.arange(int(sizes[:, 0].max()), device=device)
        x = torch.arange(int(sizes[:, 1].max()), device=device)
        # What is beyond an image's edges repeats them, with no weight.
        lines = offset + y.minimum(height - 1) * width
        images_NYXC = flat[lines[..., None] + x.minimum(width - 1)[:, None]].float()
        swapped = group[0].swapped
        first, second = self._size[::-1] if swapped else self._size
        weights_NAY = self._weights(axes[:, 0], first, y, height)
        weights_NBX = self._weights(axes[:, 1], second, x, width)
        half = torch.einsum("nay,nyxc->naxc", weights_NAY, images_NYXC)
        made = torch.einsum("nbx,naxc->n" + ("bac" if swapped else "abc"), weights_NBX, half)
        pixels = made.round_().clamp_(0, 255).to(torch.uint8)
        if self._normalize is not None:
            ours = self._normalize
            out = torch.empty((len(group), *rows.shape[1:]), dtype=rows.dtype, device=device)
            normalize_into(pixels, ours.mean, ours.std, out, ours.layout)
            pixels = out
        rows.index_copy_(0, row[:, 0], pixels)

    def _weights(
        self, axis: torch.Tensor, count: int, place: torch.Tensor, length: torch.Tensor
    ) -> torch.Tensor:
        """(N, count, places): the part of each stored pixel in each pixel of the output."""
        start, step = axis[:, :1], axis[:, 1:] / count
        centre = start + (torch.arange(count, device=self._device) + 0.5) * step
        away = place + 0.5 - centre[..., None]
        if not self._nearest:
            away /= step.abs().clamp(min=1)[..., None]
        weights = self._filter(away) * (place < length)[:, None]
        return weights / weights.sum(-1, keepdim=True)

    def put(self, pixels: Any, row: torch.Tensor) -> None:
        """Write an image that was decoded on the host to its row; ``pixels`` have the bits of the row's dtype."""
        with torch.no_grad(), self.writing():
            self._landing.backend.copy(row, torch.from_numpy(pixels).view(row.dtype))

    # -- slabs ---------------------------------------------------------------------------------

    def take(self, nbytes: int, riding: Any) -> torch.Tensor:
        """See ``StageSlabs``; on the device."""
        return self._landing.take(nbytes)

    def deliver(
        self, slab: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> tuple[torch.Tensor, Arrival]:
        """The tensor that the stage has written at the slab's start, and the event after which it may be read."""
        lease, arrival = self._landing.lend(slab)
        return lease.tensor(dtype, shape), arrival

    def pack(self, chunk: Chunk, arrival: Arrival, made: torch.Tensor) -> None:
        """Copy the other tensors of ``chunk`` to the device, and say when it may be read."""
        chunk.packed = None
        chunk.data, copied = self._landings.send(0, chunk.data, None, torch.Tensor.is_pinned)
        events = [arrival] if copied is None else [arrival, copied]
        self._landings.hand_on(chunk, events, self._context.read_by_stages)

    def close(self) -> None:
        self._landings.close()


def _placed(part: ImagePart) -> tuple[bool, tuple[_Axis, _Axis]]:
    """Whether the axes of the output are exchanged in the stored image, and which part of each stored axis it shows."""
    header, (region, flip, box) = part
    swapped, rows_reversed, columns_reversed = STEPS[header.orientation]
    left, top, right, bottom = box or Box(0, 0, region.width, region.height)
    rows = _Axis(top, bottom - top)
    columns = _Axis(right, left - right) if flip else _Axis(left, right - left)
    rows = rows.reversed(region.height) if rows_reversed else rows
    columns = columns.reversed(region.width) if columns_reversed else columns
    return swapped, (columns, rows) if swapped else (rows, columns)


def _groups(images: Sequence[_Decoded]) -> Iterator[list[_Decoded]]:
    """Images to resize together: of similar size, and with the same axes exchanged."""
    group: list[_Decoded] = []
    height = width = 0
    for image in sorted(images, key=lambda image: (image.swapped, image.side)):
        y, x = image.pixels.shape[:2]
        similar = group and image.swapped == group[0].swapped and image.side <= group[0].side * GROUP_SIDES
        if group and not (similar and (len(group) + 1) * max(height, y) * max(width, x) <= GROUP_PIXELS):
            yield group
            group, height, width = [], 0, 0
        group.append(image)
        height, width = max(height, y), max(width, x)
    if group:
        yield group


def _decoder(device: torch.device) -> Any:
    """nvImageCodec's decoder of JPEGs on a GPU, or on the CPU for other devices.

    Raises:
        MissingExtraError: nvImageCodec is not installed, or has no nvJPEG that decodes here.
    """
    what = f"DecodeImage(device={str(device)!r})"
    nv = nvimgcodec_module(what)
    if device.type != "cuda":
        return cpu_decoder(nv)
    kinds = (nv.BackendKind.HW_GPU_ONLY, nv.BackendKind.GPU_ONLY, nv.BackendKind.HYBRID_CPU_GPU)
    tried = io.BytesIO()
    pillow("decoding images").new("RGB", (64, 64)).save(tried, "JPEG")
    try:
        decoder = nv.Decoder(device_id=device.index, backends=[nv.Backend(kind) for kind in kinds])
        if decoder.decode(nv.CodeStream(tried.getvalue())) is None:
            raise RuntimeError("nvImageCodec decodes no JPEG on the GPU without it")
    except RuntimeError as error:
        raise MissingExtraError("nvJPEG", "nvimgcodec", what, str(error)) from error
    return decoder
