"""Chooses and opens decoding backends: by name, or by what is installed and what is measured here.

Pillow, whose bytes differ from those of all others, is taken when OpenCV is
not installed and never because of a measurement.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pipegraph.errors import GraphError, MissingExtraError
from pipegraph.forks import lock_free_after_fork
from pipegraph.operators.images.crop import Region
from pipegraph.operators.images.decoder import ImageBackend
from pipegraph.operators.images.header import probe
from pipegraph.operators.images.nvimgcodec import NvimgcodecRegions
from pipegraph.operators.images.opencv import OpencvRegions, opencv
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
    """Open a backend by its name; ``"auto"`` is calibrated once per process."""
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
    """Backends of one family give the same bytes, which a state must agree with; opens nothing."""
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


_MARGIN = 1.03
_ROUNDS = 4


@dataclass(frozen=True)
class Calibration:
    """What was measured: JPEG regions per second of one thread, by decoder in order of preference: ``exact`` at full
    scale, and ``reduced`` at half scale of those that can. ``broken`` ones are installed but could not be loaded.
    """

    exact: Mapping[str, float]
    reduced: Mapping[str, float]
    broken: tuple[str, ...] = ()

    def __str__(self) -> str:
        exact, reduced = fastest(self.exact), fastest(self.reduced)
        if len(self.exact) == 1:
            words = f"{exact} (no other could be used)"
        else:
            words = f"{exact} ({_ratio(self.exact)} by calibration), reduced scale {reduced}"
            if len(self.reduced) > 1:
                words += f" ({_ratio(self.reduced)})"
        return words + "".join(f"; {name} could not be loaded" for name in self.broken)

    def figures(self) -> list[str]:
        """The rates themselves, a line for each scale."""
        return [
            f"{scale}: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
            for scale, rates in (("full scale", self.exact), ("reduced scale", self.reduced))
        ]


def calibrate(decoders: Mapping[str, RegionDecoder], broken: tuple[str, ...] = ()) -> Calibration:
    """Measure these decoders; takes tens of milliseconds."""
    return Calibration(_rates(decoders, 500, 375, 95, 1), _rates(decoders, 800, 600, 90, 2), broken)


def fastest(rates: Mapping[str, float]) -> str:
    """The name with the highest rate; an earlier one stays unless beaten by more than 3 %."""
    best, *others = rates
    for name in others:
        if rates[name] > _MARGIN * rates[best]:
            best = name
    return best


def _ratio(rates: Mapping[str, float]) -> str:
    """The chosen one's rate beside that of the first, else the best of the others beside it."""
    first, best = next(iter(rates)), fastest(rates)
    if best != first:
        return f"{rates[best] / rates[first]:.2f} x {first}"
    second = max(list(rates)[1:], key=rates.__getitem__)
    return f"{second} {rates[second] / rates[first]:.2f} x"


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
    return {name: 1 / taken for name, taken in seconds.items() if taken < float("inf")}


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
