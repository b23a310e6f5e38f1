"""Opens decoding backends, by name or the fastest one that is installed; and the backend made of region decoders.

A region decoder gives the pixels of one region at a whole scale. All of them stand on libjpeg-turbo with the accurate
DCT and fancy upsampling, and so give the same bytes; they differ in how much of the image they must decode for that.
Pillow, whose bytes differ from those of all others, is taken only where OpenCV is not installed.

Pillow shrinks with a filter that is widened by the scale (antialiased); the
crop is made first, so pixels outside the region have no part in the result. The antialiased linear filter,
Pillow's ``BILINEAR``, is the same on every backend: torchvision's ``Resize`` is this filter, on Pillow images by Pillow
itself and on tensors by ``torch.nn.functional.interpolate(antialias=True)``. What differs is the rounding: by one grey
level of torch's at most, and by two of Pillow's, of whole images, which are cropped after they are resized.
"""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from pipegraph.errors import DecodeError, MissingExtraError, PipegraphWarning
from pipegraph.operators.images.crop import CropWindow, Region, oriented, stored_region, swaps_sides
from pipegraph.operators.images.header import Buffer, Header, ImageHWC, Interpolation, opened, pillow, refusal
from pipegraph.operators.images.native import library
from pipegraph.operators.images.regions import (
    NvimgcodecRegions,
    OpencvRegions,
    SimplejpegRegions,
    reduction,
    resize_into,
)


def _fill(image: Any, out: ImageHWC, window: CropWindow, interpolation: Interpolation) -> None:
    """Scale a Pillow image of the window's region, oriented, to fill ``out``."""
    scaled = image.resize(out.shape[1::-1], _FILTERS[interpolation], box=window.box)
    made = np.asarray(scaled).reshape(out.shape)
    np.copyto(out, made[:, ::-1] if window.flip else made)


def antialias_into(pixels: ImageHWC, out: ImageHWC, orientation: int, window: CropWindow) -> None:
    """Scale the pixels of the window's region (stored rows and columns) to fill ``out``, which is oriented."""
    seen = np.ascontiguousarray(oriented(pixels, orientation))
    seen = seen.reshape(seen.shape[:2]) if out.shape[2] == 1 else seen
    _fill(pillow("interpolation='antialias'").fromarray(seen), out, window, "antialias")


# Values of PIL.Image.Resampling.
_FILTERS = {"nearest": 0, "linear": 2, "cubic": 3, "area": 4, "antialias": 2}

# Values of PIL.Image.Transpose for the EXIF orientations, as PIL.ImageOps.exif_transpose has them.
_TRANSPOSE = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


def _refuse_cut_off(image: Any) -> None:
    """Raises DecodeError for a grey image of which convert() would cut off values: nothing says what its white is."""
    pixels = np.asarray(image)
    low, high = pixels.min(), pixels.max()
    fits = low >= 0 and high <= 255  # False for NaN
    if not fits or (high <= 1 and (pixels % 1).any()):
        raise DecodeError(
            f"a grey {image.format} of 32 bits per pixel, from {low} to {high}, of which 8 bits would not hold what "
            "it shows: make it one of 8 or 16 bits when you write it, or decode it in a Map of your own"
        )


class PillowBackend:
    """The reference: decodes the whole image with Pillow, every step in full precision. Other backends give it what is
    unusual. Thread-safe, as all backends.
    """

    def __init__(self) -> None:
        self._images = pillow("decoding images")

    def decode_into(
        self, data: Buffer, header: Header, window: CropWindow, out: ImageHWC, interpolation: Interpolation
    ) -> None:
        """Decode ``window`` of the image, whose header ``probe`` has read, and scale it to fill ``out``.

        Args:
            out: uint8 (height, width, channels), each row contiguous; 3 channels for RGB, 1 for greyscale. Every byte
                is written, or an error is raised and the content is undefined.
            interpolation: shrinking, ``"nearest"`` skips pixels; ``"area"`` averages them; ``"linear"`` and ``"cubic"``
                are widened by the scale here, and in other backends average whole blocks first where the scale is two
                or more (three in one direction alone). ``"antialias"`` is Pillow's linear filter at full scale, on all
                backends.

        Raises:
            DecodeError: the image is truncated, broken, or of a kind that is not decoded.
        """
        Image = self._images
        top, left, h, w = stored_region(window.region, header.orientation, *header.size)
        try:
            image = opened(io.BytesIO(data))
            # Pillow scales what PPM holds to 16 bits, and calls that as it calls the 32 bits of a TIFF.
            sixteen = image.mode.startswith("I;16") or (image.mode == "I" and header.format != "TIFF")
            if image.mode in ("F", "I") and not sixteen:
                _refuse_cut_off(image)
            if (h, w) != (image.height, image.width):
                image = image.crop((left, top, left + w, top + h))
            # Transparency is dropped, not blended; without this Pillow warns about it.
            image.info.pop("transparency", None)
            if sixteen:
                # convert() would clip at 255 and leave white; the upper byte is what colour images keep.
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            image = image.convert("L" if out.shape[2] == 1 else "RGB")
            if header.orientation != 1:
                image = image.transpose(Image.Transpose(_TRANSPOSE[header.orientation]))
        except (DecodeError, MemoryError):
            raise
        except Exception as error:
            raise refusal(data, error) from error
        _fill(image, out, window, interpolation)


class RegionDecoder(Protocol):
    """Decodes one region of a plain, complete image; safe on any number of threads."""

    def decode(
        self, data: Buffer, header: Header, region: Region, factor: int, channels: int
    ) -> ImageHWC | None:
        """The pixels of ``region`` (stored rows and columns, inside the image), shrunk by ``factor``, of a JPEG if
        above 1.

        Returns:
            uint8 (rows, columns) or (rows, columns, channels), valid until this thread's next call; None where the
            decoder cannot do it.
        """
        ...


class RegionBackend:
    """A backend that decodes no more than it must; Pillow decodes what is unusual or broken.

    Args:
        decoders: of regions of JPEGs; each does what those before it cannot. The last one decodes other formats too.
    """

    def __init__(self, decoders: Sequence[RegionDecoder]) -> None:
        self._decoders = decoders
        self._pillow = PillowBackend()

    def decode_into(
        self, data: Buffer, header: Header, window: CropWindow, out: ImageHWC, interpolation: Interpolation
    ) -> None:
        pixels = None
        if header.plain and header.complete:
            region = stored_region(window.region, header.orientation, *header.size)
            height, width = out.shape[1::-1] if swaps_sides(header.orientation) else out.shape[:2]
            jpeg = header.format == "JPEG"
            whole = not jpeg or interpolation in ("nearest", "antialias")
            factor = 1 if whole else reduction(region, height, width)
            for decoder in self._decoders if jpeg else self._decoders[-1:]:
                pixels = decoder.decode(data, header, region, factor, out.shape[2])
                if pixels is not None:
                    break
        if pixels is None:
            self._pillow.decode_into(data, header, window, out, interpolation=interpolation)
        elif interpolation == "antialias":
            antialias_into(pixels, out, header.orientation, window)
        else:
            resize_into(pixels, out, header.orientation, window.flip, interpolation)


BACKENDS: tuple[str, ...] = ("auto", "pillow", "opencv", "simplejpeg", "nvimgcodec")

# The fastest first: each does less than the next. Random crops of photographs (500 x 375), one thread: 1,006, 920 and
# 828 images/s with OpenCV. nvImageCodec has no reduced scale, and leaves that to the next.
_DECODERS: dict[str, tuple[str, Callable[[], RegionDecoder]]] = {
    "nvimgcodec": ("nvidia.nvimgcodec", NvimgcodecRegions),
    "simplejpeg": ("simplejpeg", SimplejpegRegions),
}


def open_backend(name: str, whole: bool = False) -> PillowBackend | RegionBackend:
    """Open a backend by its name; ``"auto"`` is the fastest that is installed, of ``whole`` images or of crops."""
    if family_of(name) == "pillow":
        return PillowBackend()
    last = OpencvRegions()
    decoders: list[RegionDecoder] = []
    for each in (name,) if name in _DECODERS else _fast(whole) if name == "auto" else ():
        try:
            decoders.append(_DECODERS[each][1]())
        except MissingExtraError as error:
            if name == each:
                raise
            warnings.warn(
                f"DecodeImage does without {each}, which is installed and cannot be loaded: {error.__cause__}",
                PipegraphWarning,
                stacklevel=2,
            )
    return RegionBackend([*decoders, last])


def family_of(name: str) -> str:
    """Backends of one family give the same bytes, which a state must agree with; opens nothing."""
    return "pillow" if name == "pillow" or (name == "auto" and not installed("cv2")) else "opencv"


def takes_native(name: str, interpolation: Interpolation) -> bool:
    """Whether the compiled decoder comes first; opens nothing."""
    wanted = name == "auto" and interpolation == "linear" and family_of(name) == "opencv"
    return wanted and library() is not None


def installed(module: str) -> bool:
    """Whether ``module`` could be imported; imports no more than its parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except ValueError:  # another thread is importing it: OpenCV has no spec meanwhile
        return True


def _fast(whole: bool) -> list[str]:
    """The decoders that are installed, OpenCV aside.

    Of whole images nvImageCodec decodes no more than the others: not worth its import, 10 ms of the first batch.
    """
    names = [name for name, (module, _) in _DECODERS.items() if installed(module)]
    return [name for name in names if not (whole and name == "nvimgcodec")]


def note_of(name: str, whole: bool = False, interpolation: Interpolation = "linear") -> str:
    """One line for ``plan()``: which decoder it is; opens nothing."""
    if takes_native(name, interpolation):
        return "auto: compiled, many rows in one call without the GIL"
    if name != "auto":
        return f"decodes with {name}, as asked"
    if family_of(name) == "pillow":
        return "auto: pillow, because OpenCV is not installed"
    first, *others = [*_fast(whole), "opencv"]
    return f"auto: {first}" + (f", and {others[0]} at reduced scale" if first == "nvimgcodec" else "")
