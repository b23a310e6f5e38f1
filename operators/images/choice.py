"""Opens decoding backends, by name or the fastest one that is installed; and the backend made of region decoders.

A region decoder gives the pixels of one region at a whole scale. All of them stand on libjpeg-turbo with the accurate
DCT and fancy upsampling, and so give the same bytes; they differ in how much of the image they must decode for that.
Pillow, whose bytes differ from those of all others, is taken only where OpenCV is not installed.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

from pipegraph.errors import GraphError, MissingExtraError, PipegraphWarning
from pipegraph.operators.images.crop import CropWindow, Region
from pipegraph.operators.images.decoder import Buffer, ImageBackend, ImageHWC, Interpolation
from pipegraph.operators.images.header import Header
from pipegraph.operators.images.native import library
from pipegraph.operators.images.nvimgcodec import NvimgcodecRegions
from pipegraph.operators.images.opencv import OpencvRegions, reduction, resize_into
from pipegraph.operators.images.orientation import stored_region, swaps_sides
from pipegraph.operators.images.pillow import PillowBackend, antialias_into
from pipegraph.operators.images.simplejpeg import SimplejpegRegions


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


def open_backend(name: str, whole: bool = False) -> ImageBackend:
    """Open a backend by its name; ``"auto"`` is the fastest that is installed, of ``whole`` images or of crops."""
    if name not in BACKENDS:
        raise GraphError(f"DecodeImage: backend must be one of {', '.join(BACKENDS)}, got {name!r}")
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
