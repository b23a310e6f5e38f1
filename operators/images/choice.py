"""Chooses and opens decoding backends: by name, or by what is installed and what ``calibration`` measures here.

Pillow, whose bytes differ from those of all others, is taken when OpenCV is
not installed and never because of a measurement.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from pipegraph.errors import GraphError, MissingExtraError
from pipegraph.forks import lock_free_after_fork
from pipegraph.operators.images.calibration import Calibration, calibrate, fastest
from pipegraph.operators.images.decoder import ImageBackend
from pipegraph.operators.images.nvimgcodec import NvimgcodecRegions
from pipegraph.operators.images.opencv import OpencvRegions
from pipegraph.operators.images.pillow import PillowBackend
from pipegraph.operators.images.regions import RegionBackend, RegionDecoder
from pipegraph.operators.images.simplejpeg import SimplejpegRegions

BACKENDS: tuple[str, ...] = ("auto", "pillow", "opencv", "simplejpeg", "nvimgcodec")

# In order of preference: a later one must be measurably faster to be chosen.
_DECODERS: dict[str, tuple[str, Callable[[], RegionDecoder]]] = {
    "opencv": ("cv2", OpencvRegions),
    "nvimgcodec": ("nvidia.nvimgcodec", NvimgcodecRegions),
    "simplejpeg": ("simplejpeg", SimplejpegRegions),
}
_lock = lock_free_after_fork()
_auto: ImageBackend | None = None
_measured: Calibration | None = None


def open_backend(name: str) -> ImageBackend:
    """Open a backend by its name; ``"auto"`` is calibrated once per process.

    Raises:
        GraphError: there is no such backend.
        MissingExtraError: the package it stands on is not installed.
    """
    global _auto, _measured
    if name == "auto":
        with _lock:
            if _auto is None:
                _auto, _measured = _calibrate()
            return _auto
    if name == "pillow":
        return PillowBackend()
    if name not in BACKENDS:
        raise GraphError(f"DecodeImage: backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    other = OpencvRegions()
    decoder = other if name == "opencv" else _DECODERS[name][1]()
    return RegionBackend(name, decoder, other if name == "nvimgcodec" else decoder, other)


def family_of(name: str) -> str:
    """Backends of one family give the same bytes: ``"pillow"``, or ``"opencv"`` for all others; opens nothing.

    It belongs to what a state must agree with.
    """
    return "pillow" if name == "pillow" or (name == "auto" and not installed("cv2")) else "opencv"


def installed(module: str) -> bool:
    """Whether ``module`` could be imported; imports no more than its parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def known_calibration() -> Calibration | None:
    """What ``open_backend("auto")`` has measured in this process, if it has."""
    with _lock:
        return _measured


def note_of(name: str) -> str:
    """One line for ``plan()``: which decoder it is, as far as that is known; opens nothing."""
    if name != "auto":
        return f"decodes with {name}, as asked"
    measured = known_calibration()
    if measured is not None:
        return f"auto: {measured}"
    if not installed("cv2"):
        return "auto: pillow, because OpenCV is not installed"
    return "auto: the decoder is chosen by calibration when it opens; `pipegraph doctor` shows which"


def _calibrate() -> tuple[ImageBackend, Calibration | None]:
    if not installed("cv2"):
        return PillowBackend(), None
    decoders: dict[str, RegionDecoder] = {}
    broken = []
    for name, (module, make) in _DECODERS.items():
        if not installed(module):
            continue
        try:
            decoders[name] = make()
        except MissingExtraError:
            if name == "opencv":  # every other stands on it
                raise
            broken.append(name)
    measured = calibrate(decoders, tuple(broken))
    exact, reduced = decoders[fastest(measured.exact)], decoders[fastest(measured.reduced)]
    return RegionBackend("auto", exact, reduced, decoders["opencv"]), measured
