"""Which decoder does what: by name, or by what is installed and what is measured here.

Measuring never changes what is delivered: only region decoders that give the
same bytes compete. Pillow, whose bytes differ, is taken when OpenCV is not
installed and never because of a measurement.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from pipegraph.errors import GraphError
from pipegraph.operators.images.backend import Backend
from pipegraph.operators.images.crop import Region
from pipegraph.operators.images.header import probe
from pipegraph.operators.images.nvimgcodec import NvimgcodecRegions
from pipegraph.operators.images.opencv import OpencvRegions
from pipegraph.operators.images.pillow import PillowBackend
from pipegraph.operators.images.regions import RegionBackend, RegionDecoder
from pipegraph.operators.images.scaling import opencv
from pipegraph.operators.images.simplejpeg import SimplejpegRegions

BACKENDS: tuple[str, ...] = ("auto", "pillow", "opencv", "simplejpeg", "nvimgcodec")

# In order of preference: a later one must be measurably faster to be chosen.
_DECODERS: dict[str, tuple[str, Callable[[], RegionDecoder]]] = {
    "opencv": ("cv2", OpencvRegions),
    "simplejpeg": ("simplejpeg", SimplejpegRegions),
    "nvimgcodec": ("nvidia.nvimgcodec", NvimgcodecRegions),
}
_MARGIN = 1.03
_ROUNDS = 3

_lock = threading.Lock()
_calibrated: Backend | None = None


def open_backend(name: str) -> Backend:
    """Open a backend by its name; ``"auto"`` is calibrated once per process.

    Raises:
        GraphError: there is no such backend.
        MissingExtraError: the package it stands on is not installed.
    """
    global _calibrated
    if name == "auto":
        with _lock:
            if _calibrated is None:
                _calibrated = _calibrate()
            return _calibrated
    if name == "pillow":
        return PillowBackend()
    if name not in BACKENDS:
        raise GraphError(f"DecodeImage: backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    other = OpencvRegions()
    decoder = other if name == "opencv" else _DECODERS[name][1]()
    return RegionBackend(name, decoder, other if name == "nvimgcodec" else decoder, other)


def family_of(name: str) -> str:
    """``Backend.family`` of what ``open_backend(name)`` gives here; opens nothing.

    It belongs to what a state must agree with: two families differ in their bytes.
    """
    return "pillow" if name == "pillow" or (name == "auto" and not installed("cv2")) else "opencv"


def installed(module: str) -> bool:
    """Whether ``module`` could be imported; imports no more than its parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def fastest(rates: Mapping[str, float]) -> str:
    """The name with the highest rate; an earlier one stays unless beaten by more than 3 %.

    Raises:
        ValueError: there are none.
    """
    names = list(rates)
    best = names[0]
    for name in names[1:]:
        if rates[name] > _MARGIN * rates[best]:
            best = name
    return best


def _calibrate() -> Backend:
    if not installed("cv2"):
        return PillowBackend()
    decoders = {name: make() for name, (module, make) in _DECODERS.items() if installed(module)}
    exact = _rates(decoders, 500, 375, 95, 1)
    reduced = _rates({k: d for k, d in decoders.items() if k != "nvimgcodec"}, 800, 600, 90, 2)
    report = "; ".join(
        what + " " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        for what, rates in (("regions/s of one thread at calibration: exact", exact), ("reduced", reduced))
    )
    return RegionBackend(
        "auto", decoders[fastest(exact)], decoders[fastest(reduced)], decoders["opencv"], report
    )


def _rates(
    decoders: Mapping[str, RegionDecoder], width: int, height: int, quality: int, factor: int
) -> dict[str, float]:
    """Regions per second of each decoder on a made-up photograph; alternated, best of a few rounds."""
    data = _photograph(width, height, quality)
    header = probe(data)
    # The median of RandomResizedCrop: half of the area, in the middle.
    region = Region(round(0.15 * height), round(0.15 * width), round(0.7 * height), round(0.7 * width))
    seconds = dict.fromkeys(decoders, float("inf"))
    for _ in range(_ROUNDS):
        for name, decoder in decoders.items():
            start = time.thread_time()
            decoded = decoder.decode(data, header, region, factor, 3)
            if decoded is not None:
                seconds[name] = min(seconds[name], time.thread_time() - start)
    return {name: 1 / taken for name, taken in seconds.items()}


def _photograph(width: int, height: int, quality: int) -> bytes:
    """A JPEG with about a photograph's mixture of smooth areas, edges and grain; made in milliseconds."""
    cv2 = opencv()
    rng = np.random.default_rng(0)
    grain = rng.integers(-8, 9, (height // 4 + 1, width // 4 + 1, 3)).astype(np.float32)
    scene = np.tile(grain, (4, 4, 1))[:height, :width]
    for cells, strength in ((6, 60), (120, 15)):
        coarse = rng.normal(64, strength, (cells * 3 // 4, cells, 3)).astype(np.float32)
        scene += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR)
    pixels = cv2.convertScaleAbs(scene)
    return bytes(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])[1])
