"""``DecodeImage``: encoded bytes to uint8 pixels, each written once, straight into the batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch

from pipegraph.batches import select_rows
from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Operator, RowOperator, Source, Traits
from pipegraph.device.backend import normalised
from pipegraph.errors import DataError, GraphError, note, shown
from pipegraph.integers import integer
from pipegraph.operators.batch_slabs import StageSlabs
from pipegraph.operators.collate import collate
from pipegraph.operators.images.backends import BACKENDS, family_of, note_of, open_backend, takes_native
from pipegraph.operators.images.companions import Companions, names_of
from pipegraph.operators.images.crop import DRAWS, Crop, check_crop, crop_window
from pipegraph.operators.images.header import INTERPOLATIONS, Interpolation, probe
from pipegraph.operators.images.image_batch import FIELDS, ImageBatch, ImagePart, find_encoded, with_pixels
from pipegraph.operators.images.native import NativeRows
from pipegraph.operators.images.regions import Scratch
from pipegraph.operators.load import Load, no_path
from pipegraph.operators.normalize import Normalize, bits_of, row_filler, tables_of
from pipegraph.storage.shard_files import read_file

if TYPE_CHECKING:
    from pipegraph.operators.images.on_device import DeviceDecoder

_pixels = Scratch()

MOST_THREADS = 4
"""Without the compiled decoder an image holds the interpreter's lock for a tenth of its CPU time: four threads gave a
GPU 0.96 of what processes did, and fourteen 0.48 (``benchmarks/gpu_training.py``). With it, fourteen threads are as
fast as processes also beside a loop that never lets the lock go (``benchmarks/gil.py``)."""


@final
class DecodeImage(RowOperator):
    """Decode bytes to ``"image"`` (or ``output``): a uint8 tensor, HWC on a sample and NHWC on a batch.

    On a batch of encoded samples (put ``Batch`` before it), the workers decode the rows in parallel, each directly into
    its place in the batch, so collating needs no copy. A ``Normalize`` directly after it runs in the same workers,
    while an image's pixels are in the CPU cache; so does an inline ``Load`` of files before that ``Batch``. Crop and
    flip are chosen before a pixel is decoded, from the sample's own generator and the size in the image's header, and
    are the same for every backend. The EXIF orientation is applied before the crop.

    Args:
        size: size of the output in pixels: an int (square) or (height, width).
        field: the field with the encoded bytes; by default the first of ``image, jpg, jpeg, png, webp, bytes`` that the
            sample has.
        crop: ``ops.RandomResizedCrop(...)``, ``ops.CenterCrop(resize)``, or None for the whole image.
        flip: probability of mirroring left to right.
        backend: ``"auto"``, ``"pillow"``, ``"opencv"``, ``"simplejpeg"`` or ``"nvimgcodec"``.
        interpolation: ``"linear"``, ``"cubic"``, ``"area"``, ``"nearest"`` or ``"antialias"``. The last is for
            evaluation: it is within one grey level of torchvision's ``Resize`` and ``CenterCrop`` of tensors, and
            within two of those of Pillow images, on every backend.
            ``docs/images.md`` explains each and shows its cost.
        mode: ``"RGB"`` (3 channels) or ``"L"`` (1, greyscale).
        output: the field for the pixels; the encoded bytes are removed.
        masks, boxes, keypoints: fields that get the same crop and flip as the image, and keep their names. Masks are
            encoded images of one channel, or arrays (height, width), and have the size of the image. They get the
            output's size by nearest-pixel interpolation. Boxes are (n, 4): left, top, right, bottom. Keypoints are
            (..., 2): x, y. Both are in pixels of the image after the EXIF orientation, and become float32 in pixels of
            the output. Boxes are clipped to the output; those outside remain, with no area.
        region: name of a field to add: a dict of the crop ``top, left, height, width`` in pixels of the image, with
            ``flip``, ``image_height`` and ``image_width``.
        device: where to decode JPEGs, of batches: ``"cuda"`` or another name of ``CopyToDevice``'s. nvImageCodec
            decodes them there; ``backend`` decodes other images, on the host. All tensors of a batch are delivered on
            the device. ``interpolation`` is then as in Pillow. See ``docs/images.md``.

    Raises:
        GraphError: an argument is out of range, a choice is unknown, or a field is named for two things.
        MissingExtraError: when a worker opens it: the backend is not installed.
        DecodeError: while it runs: bytes are not an image, one that was cut short, pixels that fail their format's
            checksum (PNG), or a grey image of 32 bits whose values 8 bits do not hold. In a batch, only that sample
            fails. Damage inside a JPEG or WebP, which have no checksum, is mostly delivered, as by Pillow and OpenCV.
        DataError: while it runs: a sample lacks the field, or a mask has another size than its image.
    """

    name = "decode"

    def __init__(
        self,
        size: int | tuple[int, int],
        field: str | None = None,
        crop: Crop = None,
        flip: float = 0.0,
        backend: str = "auto",
        interpolation: Interpolation = "linear",
        mode: Literal["RGB", "L"] = "RGB",
        output: str = "image",
        masks: str | Sequence[str] = (),
        boxes: str | Sequence[str] = (),
        keypoints: str | Sequence[str] = (),
        region: str | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        rule = "must be an int or (height, width) >= {}"
        given = tuple(size) if isinstance(size, tuple | list) else (size, size)
        if len(given) != 2:
            raise GraphError(f"DecodeImage: size {rule.format(1)}, got {shown(size)}")
        pair = tuple(integer(each, "DecodeImage: size", 1, rule) for each in given)
        if isinstance(flip, bool) or not isinstance(flip, int | float) or not 0 <= flip <= 1:
            raise GraphError(f"DecodeImage: flip is a probability in 0..1, got {shown(flip)}")
        if backend not in BACKENDS:
            raise GraphError(f"DecodeImage: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if mode not in ("RGB", "L"):
            raise GraphError(f'DecodeImage: mode must be "RGB" or "L", got {mode!r}')
        check_crop(crop, (pair[0], pair[1]))
        if interpolation not in INTERPOLATIONS:
            raise GraphError(
                f"interpolation must be one of {', '.join(INTERPOLATIONS)}, got {interpolation!r}"
            )
        (self.output,) = names_of([output], "output")
        if region is not None:
            (region,) = names_of([region], "region")
        self.companions = Companions(
            names_of(masks, "masks"), names_of(boxes, "boxes"), names_of(keypoints, "keypoints"), region
        )
        names = [self.output, *self.companions.fields, region]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise GraphError(f"DecodeImage: field {twice!r} is named for two things")
        self.size = (pair[0], pair[1])
        if field is not None and not isinstance(field, str):
            raise GraphError(f"DecodeImage: field must be a field's name or None, got {shown(field)}")
        self.field = field
        self.crop = crop
        self.flip = float(flip)
        self.backend = backend
        self.interpolation: Interpolation = interpolation
        self.mode = mode
        place = None if device is None else normalised(device)
        self.device = None if place is None or place.type == "cpu" else place
        self.needs = "any" if self.device is None else "batch"
        self.random = (crop is not None and crop.random) or flip > 0
        self.depends_on = "item|random" if self.random else "item"
        self._channels = 3 if mode == "RGB" else 1
        self._context = Context("")
        self._decoder: Any = None
        self._native: NativeRows | None = None
        self._slabs: Any  # StageSlabs, or the DeviceDecoder
        self._device: DeviceDecoder | None = None
        self._normalize: Normalize | None = None
        self._load: str | None = None
        self._fill: Any = None

    def config(self) -> dict[str, Any]:
        beside = {"output": self.output, "companions": repr(self.companions)}
        plain = self.output == "image" and not self.companions
        return {
            **({} if plain else beside),
            "size": self.size,
            "field": self.field,
            "crop": repr(self.crop),
            "flip": self.flip,
            "interpolation": self.interpolation,
            "mode": self.mode,
            "pixels": family_of(self.backend) if self.device is None else "device",
        }

    @property
    def traits(self) -> Traits:
        if self.device is not None:
            return Traits(
                in_trainer=True,
                one_worker=True,
                moves="made",
                notes=lambda: [f"decodes JPEGs on {self.device} with nvImageCodec, other images on the host"],
                take_in=self._taking_in,
            )
        return Traits(
            slabs=True,
            most_threads=None if takes_native(self.backend, self.interpolation) else MOST_THREADS,
            notes=self._notes,
            take_in=self._taking_in,
            take_in_reading=self._reading,
        )

    def _notes(self) -> list[str]:
        dtype, _, shape = self._output()
        size = "x".join(map(str, shape))
        slabs = f"writes each pixel once, into slabs of {size} {str(dtype).removeprefix('torch.')} per sample"
        return [slabs, note_of(self.backend, self.crop is None, self.interpolation)]

    def _reading(self, reader: Operator | Source, name: str) -> Operator | None:
        plain = self.field in (None, "bytes") and self.output == "image" and not self.companions
        if not plain or not isinstance(reader, Load) or not reader.reads_files:
            return None
        both = copy.copy(self)
        both._load = name
        return both

    def _taking_in(self, below: Operator) -> Operator | None:
        plain = self._normalize is None and self.output == "image"
        if not plain or not isinstance(below, Normalize) or len(below.mean) != self._channels:
            return None
        both = copy.copy(self)
        both._normalize = below
        return both

    def open(self, context: Context) -> None:
        self._context = context
        if self.device is None:
            self._slabs = StageSlabs(context)
        else:
            from pipegraph.operators.images.on_device import DeviceDecoder

            self._slabs = self._device = DeviceDecoder(
                self.device, context, self.size, self._channels, self.interpolation, self._normalize
            )
        ours = self._normalize
        if ours is not None:
            self._fill = row_filler(ours.mean, ours.std, ours.dtype, ours.layout)
        if self._device is None and takes_native(self.backend, self.interpolation):
            table = None if ours is None else tables_of(ours.mean, ours.std, ours.dtype)
            planes = ours is not None and ours.layout == "NCHW"
            self._native = NativeRows((*self.size, self._channels), planes, table, self.crop, self.flip)
        else:
            self._decoder = open_backend(self.backend, self.crop is None)

    def close(self) -> None:
        if self._device is not None:
            self._device.close()

    def _output(self) -> tuple[torch.dtype, Any, tuple[int, ...]]:
        """Dtype, the dtype as which NumPy writes it, and shape of one image."""
        height, width = self.size
        ours = self._normalize
        if ours is None:
            return torch.uint8, np.uint8, (height, width, self._channels)
        return ours.dtype, bits_of(ours.dtype), ours.shape_of(height, width)

    # -- one sample ----------------------------------------------------------------------------

    def process(self, chunk: Chunk) -> Chunk:
        field, encoded = find_encoded(chunk.data, self.field, self.output)
        dtype, bits, shape = self._output()
        image = np.empty(shape, bits)
        (written,) = self._at_once(chunk, 0, [encoded], False, image[None])
        beside = {}
        if self.companions or not written:
            part = self._part(encoded, chunk, 0)
            beside = self._beside(chunk.data, field, part)
            if not written:
                self._decode(encoded, part, image)
        chunk.keys = chunk.own_keys
        chunk.data = with_pixels(chunk.data, field, self.output, torch.from_numpy(image).view(dtype), beside)
        return chunk

    def _beside(self, sample: Any, field: Any, part: ImagePart) -> dict[str, Any]:
        """What follows the cut of one sample."""
        if not self.companions:
            return {}
        if field is None:
            raise DataError(
                "DecodeImage: masks, boxes, keypoints and region are fields: samples must be dicts"
            )
        for name in self.companions.fields:
            if name not in sample:
                raise DataError(f"DecodeImage: no field {name!r} in {', '.join(map(str, sample))}")
        header, cut = part
        return self.companions.of(sample, header.size, cut, self.size)

    # -- the rows of a batch -------------------------------------------------------------------

    def begin_batch(self, chunk: Chunk) -> ImageBatch:
        files = self._load is not None and self._reads(chunk)
        found = find_encoded(chunk.data, self.field, self.output) if not files else None
        field, encoded = found or ("bytes", chunk.data["path"])
        count = len(chunk.row_lineages)
        if not isinstance(encoded, list | tuple) or len(encoded) != count:
            raise DataError(
                f"DecodeImage: field {field!r} of a batch of {count} samples must be a list of as many encoded images, "
                f"got {type(encoded).__name__}"
            )
        dtype, written, shape = self._output()
        nbytes = count * math.prod(shape) * dtype.itemsize
        slab = self._slabs.take(nbytes, chunk.data)
        rows: Any
        if self._device is None:
            rows = slab.numpy()[:nbytes].view(written).reshape(count, *shape)
        else:
            rows = slab[:nbytes].view(dtype).view(count, *shape)
        batch = ImageBatch(chunk, field, list(encoded), files, slab, rows)
        if files:
            return batch
        if field is not None:  # then each row's bytes are released one by one
            chunk.keys = chunk.own_keys
            chunk.data = {name: value for name, value in chunk.data.items() if name != field}
        if self._device is not None:
            batch.parts = [self._part_or_error(each, chunk, row) for row, each in enumerate(encoded)]
            batch.encoded = self._device.decode(encoded, batch.parts, rows)
        return batch

    def _reads(self, chunk: Chunk) -> bool:
        """Whether the rows are to be read; they are by now where another field is to be decoded."""
        if not isinstance(chunk.data, Mapping) or "path" not in chunk.data:
            raise no_path(chunk.data)
        if self.field is None and any(name in chunk.data for name in FIELDS if name != "bytes"):
            chunk.data = {**chunk.data, "bytes": [self._read(path) for path in chunk.data["path"]]}
            return False
        return True

    def _read(self, path: Any) -> bytes:
        try:
            return read_file(path)
        except Exception as error:
            note(error, f"pipegraph: in the work of stage {self._load!r}")
            raise

    def do_rows(self, batch: ImageBatch, first: int, stop: int) -> None:
        if self._native is not None:
            encoded, rows = batch.encoded[first:stop], batch.rows[first:stop]
            written = self._at_once(batch.chunk, first, encoded, batch.files, rows)
            batch.written.update(compress(range(first, stop), written))

    def _at_once(
        self, chunk: Chunk, first: int, encoded: Sequence[Any], files: bool, out: Any
    ) -> Sequence[int]:
        """Whether the compiled decoder has written each of the rows from ``first`` on."""
        if self._native is None:
            return bytes(len(encoded))
        digests = []
        if self.random:
            from pipegraph.randomness import digest  # with NumPy's generators, which equal cuts do without

            seed, stage = self._context.seed, self._context.stage
            lineages = chunk.row_lineages[first : first + len(encoded)]
            digests = [digest(seed, chunk.epoch, lineage, stage) for lineage in lineages]
        return self._native.decode(encoded, files, digests, out)

    def do_row(self, batch: ImageBatch, index: int) -> None:
        written = index in batch.written
        if self.companions or not written:
            encoded = batch.encoded[index]
            if batch.files:
                encoded = self._read(encoded)
            part = batch.parts[index] if batch.parts else self._part(encoded, batch.chunk, index)
            if isinstance(part, Exception):
                raise part
            if self.companions:
                data = batch.chunk.data
                row = {name: data[name][index] for name in self._columns(batch)}
                batch.beside[index] = self._beside(row, batch.field, part)
            if self._device is None and not written:
                self._decode(encoded, part, batch.rows[index])
            elif self._device is not None and encoded is not None:  # the device has not decoded it
                _, bits, shape = self._output()
                image = np.empty(shape, bits)
                self._decode(encoded, part, image)
                self._device.put(image, batch.rows[index])
        batch.encoded[index] = None

    def _columns(self, batch: ImageBatch) -> list[str]:
        """The fields that follow the image and are there; each must have an entry per sample."""
        data, count = batch.chunk.data, len(batch.chunk.row_lineages)
        found = [name for name in self.companions.fields if isinstance(data, Mapping) and name in data]
        for name in found:
            if not hasattr(data[name], "__len__") or len(data[name]) != count:
                raise DataError(
                    f"DecodeImage: field {name!r} of a batch of {count} samples must have an entry for each"
                )
        return found

    def end_batch(self, batch: ImageBatch, kept: Sequence[int]) -> Chunk:
        chunk, rows, count = batch.chunk, batch.rows, len(batch.chunk.row_lineages)
        data = chunk.data
        if len(kept) < count:
            with nullcontext() if self._device is None else self._device.writing():
                for place, index in enumerate(kept):
                    rows[place] = rows[index]
            data = select_rows(data, kept, count, chunk.layout)
            chunk = chunk.select(kept, data)
        else:
            chunk.keys = chunk.own_keys
        dtype, _, shape = self._output()
        images, lent = self._slabs.deliver(batch.slab, dtype, (len(kept), *shape))
        beside = self._columns_beside(batch, kept) if self.companions else {}
        chunk.data = with_pixels(data, batch.field, self.output, images, beside)
        self._slabs.pack(chunk, lent, images)
        return chunk

    def _columns_beside(self, batch: ImageBatch, kept: Sequence[int]) -> dict[str, Any]:
        rows = [batch.beside[index] for index in kept]
        found = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            ragged = name in (*self.companions.boxes, *self.companions.keypoints)
            # What came as a list of samples' own stays one: as many boxes as each has.
            as_list = ragged and not isinstance(batch.chunk.data[name], torch.Tensor)
            found[name] = values if as_list else collate(values, None, name)
        return found

    # -- parts ---------------------------------------------------------------------------------

    def _part(self, encoded: Any, chunk: Chunk, row: int) -> ImagePart:
        header, numbers = probe(encoded), ()
        if self.random:
            from pipegraph.randomness import generator

            key = self._context.seed, chunk.epoch, chunk.row_lineages[row], self._context.stage
            numbers = generator(*key).random(DRAWS).tolist()
        exact = self.interpolation == "antialias"
        return header, crop_window(self.crop, self.flip, *header.size, self.size, numbers, exact)

    def _part_or_error(self, encoded: Any, chunk: Chunk, row: int) -> ImagePart | Exception:
        try:
            return self._part(encoded, chunk, row)
        except Exception as error:
            return error

    def _decode(self, encoded: Any, part: ImagePart, out: Any) -> None:
        header, window = part
        if self._decoder is None:
            self._decoder = open_backend(self.backend, self.crop is None)
        if not isinstance(encoded, bytes) and not memoryview(encoded).c_contiguous:
            encoded = bytes(encoded)
        if self._normalize is None:
            self._decoder.decode_into(encoded, header, window, out, interpolation=self.interpolation)
            return
        shape = (*self.size, self._channels)
        count = math.prod(shape)
        pixels = _pixels.take(count)[:count].reshape(shape)
        self._decoder.decode_into(encoded, header, window, pixels, interpolation=self.interpolation)
        self._fill(pixels, out)
