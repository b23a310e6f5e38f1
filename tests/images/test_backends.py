"""Every backend gives what Pillow gives: exactly, or within the tolerance stated here.

The tolerance: the mean absolute difference to Pillow's antialiased resize, in
levels of 255. It comes from the resize alone: OpenCV's linear filter is not
widened when it shrinks by less than two (three in one direction), which shows
on fine texture, and a region at a reduced scale starts and ends at whole pixels of that scale, half
an output pixel off at most, which shows on steep gradients in small outputs.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image, ImageOps

from pipegraph.errors import DecodeError, MissingExtraError
from pipegraph.operators.images.backends import installed, open_backend
from pipegraph.operators.images.crop import (
    DRAWS,
    CenterCrop,
    CropWindow,
    RandomResizedCrop,
    Region,
    crop_window,
)
from pipegraph.operators.images.header import probe

TOLERANCE_ON_SMALL_IMAGES = 6.0

FAST = ("opencv", "simplejpeg", "nvimgcodec", "auto")
MODULES = {"nvimgcodec": "nvidia.nvimgcodec"}


def draw(crop, flip, height, width, size, rng):
    return crop_window(crop, flip, height, width, size, rng.random(DRAWS).tolist())


def backend_of(name):
    if name in MODULES and not installed(MODULES[name]):
        pytest.skip(f"{MODULES[name]} is not installed: make test-all brings it")
    return open_backend(name)


@pytest.fixture(params=FAST)
def fast(request):
    return backend_of(request.param)


@pytest.fixture(params=("pillow", *FAST))
def backend(request):
    return backend_of(request.param)


def reference(data: bytes, window: CropWindow, height: int, width: int, mode: str = "RGB") -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's advice on transparency
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        if image.mode.startswith("I"):  # 16 bits of grey: the upper byte, where convert() would clip
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = image.convert(mode)
    top, left, h, w = window.region
    image = image.crop((left, top, left + w, top + h)).resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image).reshape(height, width, -1)
    return pixels[:, ::-1] if window.flip else pixels


def decoded(
    backend, data: bytes, window: CropWindow, height: int = 32, width: int = 40, channels: int = 3, **options
):
    out = np.full((height, width, channels), 77, np.uint8)
    backend.decode_into(data, probe(data), window, out, **{"interpolation": "linear", **options})
    return out


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(int) - b).mean())


def some_window(data: bytes, seed: int, size: tuple[int, int] = (32, 40)) -> CropWindow:
    return draw(RandomResizedCrop((0.3, 1.0)), 0.5, *probe(data).size, size, np.random.default_rng(seed))


def test_the_reference_backend_is_pillow_on_every_odd_file(odd_files):
    backend = open_backend("pillow")
    for i, (name, data) in enumerate(odd_files.items()):
        window = some_window(data, i)
        for channels, mode in ((3, "RGB"), (1, "L")):
            expected = reference(data, window, 32, 40, mode)
            assert (name, 0.0) == (
                name,
                difference(expected, decoded(backend, data, window, channels=channels)),
            )


def test_odd_files_decode_as_pillow_decodes_them(fast, odd_files):
    for i, (name, data) in enumerate(odd_files.items()):
        plain = probe(data).plain
        for seed in range(3):
            window = some_window(data, 10 * i + seed)
            for channels, mode in ((3, "RGB"), (1, "L")):
                error = difference(
                    reference(data, window, 32, 40, mode), decoded(fast, data, window, channels=channels)
                )
                limit = TOLERANCE_ON_SMALL_IMAGES if plain else 0.0
                assert error <= limit, f"{name}, {window}, {mode}: {error}"


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("end", ["jpg", "png", "webp"])
def test_every_orientation_is_applied_once(backend, odd_files, turn, end):
    data = odd_files[f"orientation-{turn}.{end}"]
    height, width = probe(data).size
    for flip in (False, True):
        window = CropWindow(Region(0, 0, height, width), flip)
        out = decoded(backend, data, window, height, width)
        assert difference(reference(data, window, height, width), out) <= 0.1


@pytest.mark.parametrize(
    ("crop", "on_average", "at_most"),
    # The more a crop shrinks photographs (by 1.2, 1.5 and 2 on average), the more the filters differ.
    [(RandomResizedCrop(), 1.7, 10.0), (CenterCrop(256), 2.3, 11.0), (None, 3.5, 17.0)],
)
def test_photographs_are_within_the_tolerance(photographs, crop, on_average, at_most):
    backend, errors = open_backend("opencv"), []
    for i, data in enumerate(photographs):
        window = draw(crop, 0.5, *probe(data).size, (224, 224), np.random.default_rng(i))
        errors.append(difference(reference(data, window, 224, 224), decoded(backend, data, window, 224, 224)))
    assert max(errors) <= at_most
    assert sum(errors) / len(errors) <= on_average


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # of the files, on Python 3.14
@settings(max_examples=150)
@given(data=st.data())
def test_all_fast_backends_give_the_same_bytes_for_any_region_and_scale(odd_files, data):
    name = data.draw(st.sampled_from([name for name in odd_files if name.endswith(".jpg")]))
    encoded = odd_files[name]
    height, width = probe(encoded).size
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    region = Region(
        top, left, data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
    )
    window = CropWindow(region, data.draw(st.booleans()))
    size = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 100))
    channels = data.draw(st.sampled_from([1, 3]))
    expected = decoded(open_backend("opencv"), encoded, window, *size, channels)
    for other in FAST[1:]:
        if other not in MODULES or installed(MODULES[other]):
            assert np.array_equal(expected, decoded(open_backend(other), encoded, window, *size, channels)), (
                other
            )


@pytest.mark.parametrize("interpolation", ["nearest", "linear", "cubic", "area"])
def test_every_interpolation_enlarges_and_shrinks(backend, encode, make_scene, interpolation):
    data = encode(make_scene(90, 120))
    filters = {"nearest": 0, "linear": 2, "cubic": 3, "area": 4}
    for height, width in ((60, 80), (180, 240)):
        out = decoded(
            backend,
            data,
            CropWindow(Region(0, 0, 90, 120), False),
            height,
            width,
            interpolation=interpolation,
        )
        image = Image.open(io.BytesIO(data)).resize((width, height), filters[interpolation])
        assert difference(np.asarray(image), out) <= 4.0


def test_only_the_given_slot_is_written(backend, odd_files):
    slab = np.full((3, 32, 40, 3), 201, np.uint8)
    for name in ("sampling-420.jpg", "orientation-6.jpg", "cmyk.jpg", "colour.png"):
        data = odd_files[name]
        backend.decode_into(data, probe(data), some_window(data, 3), slab[1], "linear")
        assert (slab[::2] == 201).all()
        assert (slab[1] != 201).any()


@pytest.mark.parametrize(
    "name", ["sampling-420.jpg", "progressive.jpg", "colour.png", "colour.webp", "grey.tiff"]
)
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_truncated_file_is_an_error_wherever_the_region_lies(backend, odd_files, name, share):
    data = odd_files[name]
    window = CropWindow(Region(0, 0, 8, 8), False)
    with pytest.raises(DecodeError, match=r"the image cannot be decoded: .+ \(\d+ bytes\)"):
        decoded(backend, data[: int(len(data) * share)], window)


@settings(max_examples=60)
@given(data=st.data())
def test_broken_files_decode_or_are_refused_and_nothing_else(odd_files, data):
    name = data.draw(st.sampled_from(["sampling-420.jpg", "progressive.jpg", "colour.png", "alpha.webp"]))
    broken = bytearray(odd_files[name])
    for _ in range(data.draw(st.integers(1, 5))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError):
        header = probe(broken)
        window = CropWindow(Region(0, 0, *header.size), False)
        if header.width * header.height <= 1_000_000:
            out = decoded(open_backend("opencv"), broken, window)
            assert np.array_equal(out, decoded(open_backend("simplejpeg"), broken, window))


@pytest.mark.parametrize(
    ("name", "module", "line"),
    [
        ("simplejpeg", "simplejpeg", r'pip install .*"simplejpeg>='),
        ("nvimgcodec", "nvidia", r'pip install "nvidia-nvimgcodec-cu13.*>='),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, name, module, line):
    monkeypatch.delitem(sys.modules, "nvidia.nvimgcodec", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=line):
        open_backend(name)
