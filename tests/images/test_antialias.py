"""``interpolation="antialias"``: what torchvision's ``Resize`` and ``CenterCrop`` show, on every backend.

torchvision's ``Resize`` of a tensor calls ``torch.nn.functional.interpolate(antialias=True)``; of a Pillow image,
``Image.resize(BILINEAR)``. Both are here, with the sizes and offsets that torchvision computes.
"""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.operators.images.backends import installed, open_backend
from pipegraph.operators.images.crop import CenterCrop, crop_window
from pipegraph.operators.images.header import probe

BACKENDS = ("pillow", "opencv", "simplejpeg", "nvimgcodec", "auto")
MODULES = {"nvimgcodec": "nvidia.nvimgcodec", "simplejpeg": "simplejpeg"}


@pytest.fixture(params=BACKENDS)
def backend(request):
    name = request.param
    if name in MODULES and not installed(MODULES[name]):
        pytest.skip(f"{MODULES[name]} is not installed: make test-all brings it")
    return open_backend(name)


def sizes(height: int, width: int, resize: int) -> tuple[int, int]:
    """torchvision's ``_compute_resized_output_size`` for one int."""
    short, long = min(height, width), max(height, width)
    new = resize, int(resize * long / short)
    return (new[0], new[1]) if height <= width else (new[1], new[0])


@lru_cache(maxsize=64)  # the same for every backend
def evaluated(data: bytes, resize: int, size: tuple[int, int], by: str) -> np.ndarray:
    """The whole image resized, then the centre cut out."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    height, width = sizes(image.height, image.width, resize)
    if by == "pillow":
        pixels = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
    else:
        whole = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].float()
        scaled = torch.nn.functional.interpolate(
            whole, (height, width), mode="bilinear", align_corners=False, antialias=True
        )
        pixels = scaled[0].round().clamp(0, 255).byte().permute(1, 2, 0).numpy()
    top, left = round((height - size[0]) / 2.0), round((width - size[1]) / 2.0)
    return pixels[top : top + size[0], left : left + size[1]].copy()


def ours(backend, data: bytes, crop, size: tuple[int, int], interpolation: str = "antialias") -> np.ndarray:
    header = probe(data)
    window = crop_window(crop, 0.0, *header.size, size, (), interpolation == "antialias")
    out = np.full((*size, 3), 77, np.uint8)
    backend.decode_into(data, header, window, out, interpolation=interpolation)
    return out


def grain(height: int, width: int, seed: int) -> np.ndarray:
    """The hardest there is: every pixel by itself."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.fixture(scope="session")
def grainy(encode):
    """A file of such pixels, made once for all backends."""
    return lru_cache(lambda *shape: encode(grain(*shape, seed=shape[0])))


SHAPES = [(300, 400), (401, 263), (256, 256), (257, 1000), (900, 640), (90, 130), (512, 513)]


@pytest.mark.parametrize("by", ["torch", "pillow"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_central_crop_is_within_one_grey_level_of_torchvisions(backend, grainy, by, shape):
    data = grainy(*shape)
    for resize, size in ((256, (224, 224)), (64, (64, 64)), (71, (56, 40))):
        expected = evaluated(data, resize, size, by).astype(int)
        assert np.abs(ours(backend, data, CenterCrop(resize), size) - expected).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_it_is_so_for_every_orientation(backend, encode, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(grain(150, 211, 3), "JPEG", quality=95, exif=exif.tobytes())
    expected = evaluated(data, 64, (56, 48), "torch").astype(int)
    assert np.abs(ours(backend, data, CenterCrop(64), (56, 48)) - expected).max() <= 1


def test_the_operator_delivers_it_on_samples_and_on_batches(encode):
    files = [encode(grain(300, 280 + n, n)) for n in range(4)]
    expected = np.stack([evaluated(data, 64, (56, 56), "pillow") for data in files])
    decode = ops.DecodeImage(56, crop=ops.CenterCrop(64), interpolation="antialias")
    for stages in ([ops.Batch(4), decode], [decode, ops.Batch(4)]):
        graph = pg.Graph("evaluation")
        node = graph.add(ops.FromIterable([{"bytes": data} for data in files]))
        for stage in stages:
            node = node.then(stage)
        with graph.loader() as loader:
            (batch,) = loader
        assert np.abs(batch["image"].numpy().astype(int) - expected).max() <= 1
