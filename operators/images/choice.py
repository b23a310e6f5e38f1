"""Opens decoding backends: by name, or the fastest one that is installed.

Pillow, whose bytes differ from those of all others, is taken only where OpenCV is not installed.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

from pipegraph.errors import GraphError, MissingExtraError, PipegraphWarning
from pipegraph.operators.images.decoder import ImageBackend
from pipegraph.operators.images.nvimgcodec import NvimgcodecRegions
from pipegraph.operators.images.opencv import OpencvRegions
from pipegraph.operators.images.pillow import PillowBackend
from pipegraph.operators.images.regions import RegionBackend, RegionDecoder
from pipegraph.operators.images.simplejpeg import SimplejpegRegions

BACKENDS: tuple[str, ...] = ("auto", "pillow", "opencv", "simplejpeg", "nvimgcodec")

# The fastest first: each does less than the next. Random crops of photographs (500 x 375), one thread: 1,006, 920 and
# 828 images/s with OpenCV. nvImageCodec has no reduced scale, and leaves that to the next.
_DECODERS: dict[str, tuple[str, Callable[[], RegionDecoder]]] = {
    "nvimgcodec": ("nvidia.nvimgcodec", NvimgcodecRegions),
    "simplejpeg": ("simplejpeg", SimplejpegRegions),
}


def open_backend(name: str) -> ImageBackend:
    """Open a backend by its name; ``"auto"`` is the fastest that is installed."""
    if name not in BACKENDS:
        raise GraphError(f"DecodeImage: backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    if family_of(name) == "pillow":
        return PillowBackend()
    last = OpencvRegions()
    decoders: list[RegionDecoder] = []
    for each in (name,) if name in _DECODERS else _fast() if name == "auto" else ():
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
    return RegionBackend(name, [*decoders, last])


def family_of(name: str) -> str:
    """Backends of one family give the same bytes, which a state must agree with; opens nothing."""
    return "pillow" if name == "pillow" or (name == "auto" and not installed("cv2")) else "opencv"


def installed(module: str) -> bool:
    """Whether ``module`` could be imported; imports no more than its parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except ValueError:  # another thread is importing it: OpenCV has no spec meanwhile
        return True


def _fast() -> list[str]:
    """The decoders that are installed, OpenCV aside."""
    return [name for name, (module, _) in _DECODERS.items() if installed(module)]


def note_of(name: str) -> str:
    """One line for ``plan()``: which decoder it is; opens nothing."""
    if name != "auto":
        return f"decodes with {name}, as asked"
    if family_of(name) == "pillow":
        return "auto: pillow, because OpenCV is not installed"
    first, *others = [*_fast(), "opencv"]
    return f"auto: {first}" + (f", and {others[0]} at reduced scale" if first == "nvimgcodec" else "")
