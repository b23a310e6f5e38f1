"""``DecodeImage``: encoded bytes to uint8 pixels, each written once, straight into the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

import numpy as np
import torch

from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, RowOperator
from pipegraph.device.slabs import SlabRing, allocator, array_of
from pipegraph.errors import DataError, GraphError
from pipegraph.operators.images import (
    Crop,
    Interpolation,
    check_crop,
    check_interpolation,
    draw,
    open_backend,
    probe,
)
from pipegraph.operators.images.choice import BACKENDS, family_of, note_of
from pipegraph.randomness import generator
from pipegraph.tree import select_rows

FIELDS = ("image", "jpg", "jpeg", "png", "webp", "bytes")
"""Where encoded bytes are looked for, in this order."""


class _Batch:
    """A batch in work: its slab, and for each row what to decode."""

    __slots__ = ("array", "chunk", "encoded", "field", "slab")

    def __init__(
        self, chunk: Chunk, field: Any, encoded: Sequence[Any], slab: torch.Tensor, array: Any
    ) -> None:
        self.chunk = chunk
        self.field = field
        self.encoded = encoded
        self.slab = slab
        self.array = array


@final
class DecodeImage(RowOperator):
    """Encoded bytes to ``"image"``: a uint8 tensor, HWC on a sample and NHWC on a batch.

    On a batch of encoded samples (``Batch`` before it) the workers decode the rows in parallel, each into its slot
    of the batch's slab: collation is free. The crop and the flip are drawn from the sample's own generator and
    the size in the image's header, before a pixel is decoded; every backend gets the same.

    Args:
        size: of the output: an int (square) or (height, width), pixels.
        field: of the encoded bytes; by default the first of ``image, jpg, jpeg, png, webp, bytes`` that is there.
        crop: ``ops.RandomResizedCrop(...)``, ``ops.CenterCrop(resize)``, or None for the whole image.
        flip: probability of mirroring left to right.
        backend: ``"auto"``, ``"pillow"``, ``"opencv"``, ``"simplejpeg"`` or ``"nvimgcodec"``.
        interpolation: ``"nearest"``, ``"linear"``, ``"cubic"`` or ``"area"``; shrinking is antialiased, except nearest.
        mode: ``"RGB"`` (3 channels) or ``"L"`` (1, greyscale).
    """

    default_name = "decode"
    slabs = True

    def __init__(
        self,
        size: int | tuple[int, int],
        field: str | None = None,
        crop: Crop = None,
        flip: float = 0.0,
        backend: str = "auto",
        interpolation: Interpolation = "linear",
        mode: Literal["RGB", "L"] = "RGB",
    ) -> None:
        pair = (size, size) if isinstance(size, int) else tuple(size)
        if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in pair):
            raise GraphError(f"DecodeImage: size must be an int or (height, width) >= 1, got {size!r}")
        if not 0 <= flip <= 1:
            raise GraphError(f"DecodeImage: flip is a probability in 0..1, got {flip!r}")
        if backend not in BACKENDS:
            raise GraphError(f"DecodeImage: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if mode not in ("RGB", "L"):
            raise GraphError(f'DecodeImage: mode must be "RGB" or "L", got {mode!r}')
        check_crop(crop, (pair[0], pair[1]))
        check_interpolation(interpolation)
        self.size = (pair[0], pair[1])
        self.field = field
        self.crop = crop
        self.flip = float(flip)
        self.backend = backend
        self.interpolation: Interpolation = interpolation
        self.mode = mode
        self.random = (crop is not None and type(crop).__name__ == "RandomResizedCrop") or flip > 0
        self._channels = 3 if mode == "RGB" else 1
        self._context = Context("")
        self._decoder: Any = None
        self._ring: SlabRing | None = None

    def config(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "field": self.field,
            "crop": repr(self.crop),
            "flip": self.flip,
            "interpolation": self.interpolation,
            "mode": self.mode,
            "pixels": family_of(self.backend),
        }

    def notes(self) -> list[str]:
        height, width = self.size
        slabs = f"writes each pixel once, into slabs of {height}x{width}x{self._channels} uint8 per sample"
        return [slabs, note_of(self.backend)]

    def open(self, context: Context) -> None:
        self._context = context
        self._decoder = open_backend(self.backend)
        self._ring = context.share("slabs", lambda: SlabRing(allocator(context.memory), spare=SPARE_SLABS))

    # -- one sample ----------------------------------------------------------------------------

    def process(self, chunk: Chunk) -> Chunk:
        field, encoded = self._find(chunk.data)
        image = torch.empty((*self.size, self._channels), dtype=torch.uint8)
        self._decode(encoded, chunk.epoch, chunk.rows[0], image.numpy())
        chunk.keys = chunk.keys
        chunk.data = self._filled(chunk.data, field, image)
        return chunk

    # -- the rows of a batch -------------------------------------------------------------------

    def begin_batch(self, chunk: Chunk) -> _Batch:
        field, encoded = self._find(chunk.data)
        count = len(chunk.rows)
        if not isinstance(encoded, list | tuple) or len(encoded) != count:
            raise DataError(
                f"DecodeImage: field {field!r} of a batch of {count} samples must be a list of as many encoded images, "
                f"got {type(encoded).__name__}"
            )
        shape = (count, *self.size, self._channels)
        assert self._ring is not None
        made = self._ring.made
        slab = self._ring.take(int(np.prod(shape)))
        self._context.count("slabs_made", self._ring.made - made)
        return _Batch(chunk, field, encoded, slab, array_of(slab, shape))

    def do_row(self, batch: _Batch, index: int, sample: Any) -> None:
        if sample is None:
            encoded = batch.encoded[index]
        else:
            _, encoded = self._find(sample)
            self._replace_fields(batch, index, sample)
        self._decode(encoded, batch.chunk.epoch, batch.chunk.rows[index], batch.array[index])

    def end_batch(self, batch: _Batch, kept: Sequence[int]) -> Chunk:
        chunk, array, count = batch.chunk, batch.array, len(batch.chunk.rows)
        data = chunk.data
        if len(kept) < count:
            for place, index in enumerate(kept):
                if place != index:
                    array[place] = array[index]
            data = select_rows(data, kept, count)
            chunk = chunk.select(kept, data)
        else:
            chunk.keys = chunk.keys
        assert self._ring is not None
        images = self._ring.lend(batch.slab).tensor(torch.uint8, (len(kept), *array.shape[1:]))
        chunk.data = self._filled(data, batch.field, images)
        return chunk

    # -- parts ---------------------------------------------------------------------------------

    def _find(self, data: Any) -> tuple[Any, Any]:
        if isinstance(data, Mapping):
            names = FIELDS if self.field is None else (self.field,)
            for name in names:
                if name in data:
                    return name, data[name]
            hint = "; put Load() before it" if "path" in data else ""
            raise DataError(
                f"DecodeImage: no field {' or '.join(names)} in {', '.join(map(str, data))}{hint}"
            )
        if isinstance(data, bytes | bytearray | memoryview) or self.field is None:
            return None, data
        raise DataError(
            f"DecodeImage: field {self.field!r} of a {type(data).__name__}: samples must be dicts"
        )

    def _filled(self, data: Any, field: Any, image: torch.Tensor) -> Any:
        if field is None:
            return image
        made = {name: value for name, value in data.items() if name != field}
        made["image"] = image
        return made

    def _decode(self, encoded: Any, epoch: int, row: tuple[Any, ...], out: Any) -> None:
        header = probe(encoded)
        rng = generator(self._context.seed, epoch, row, self._context.stage) if self.random else None
        height, width = header.size
        cut = draw(self.crop, self.flip, height, width, self.size, rng)
        self._decoder.decode_into(encoded, header, cut, out, interpolation=self.interpolation)

    def _replace_fields(self, batch: _Batch, index: int, sample: Any) -> None:
        """A substitute brings its label and the rest along."""
        if not isinstance(sample, Mapping):
            return
        for name, value in sample.items():
            column = batch.chunk.data.get(name)
            if name == batch.field or column is None:
                continue
            if isinstance(column, torch.Tensor):
                column[index] = torch.as_tensor(value)
            elif isinstance(column, list):
                column[index] = value


SPARE_SLABS = 16
"""Free slabs a ring keeps; what a user held and gave back beyond these goes to the system."""
