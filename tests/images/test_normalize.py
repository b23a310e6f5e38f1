"""uint8 images become the floats that the formula says."""

from __future__ import annotations

import pytest
import torch

from pipegraph.operators import normalize
from pipegraph.operators.normalize import DTYPES, normalize_into

MEAN, STD = (0.485, 0.456, 0.406, 0.5), (0.229, 0.224, 0.225, 0.25)


def images(channels: int, device: str = "cpu") -> torch.Tensor:
    """Every byte value in every channel."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (3, 17, 31, channels), dtype=torch.uint8, generator=generator)
    pixels[0].view(-1, channels)[:256] = torch.arange(256, dtype=torch.uint8)[:, None]
    return pixels.to(device)


def formula(pixels: torch.Tensor) -> torch.Tensor:
    channels = pixels.shape[-1]
    mean = torch.tensor(MEAN[:channels], dtype=torch.float64)
    std = torch.tensor(STD[:channels], dtype=torch.float64)
    return (pixels.cpu().double() / 255 - mean) / std


@pytest.fixture(params=["OpenCV", "NumPy"])
def looked_up_by(request, monkeypatch):
    if request.param == "NumPy":
        monkeypatch.setattr(normalize, "_cv2", lambda: None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.usefixtures("looked_up_by")
def test_every_layout_holds_the_correctly_rounded_values(dtype, channels):
    pixels = images(channels)
    expected = formula(pixels).to(dtype)
    mean, std = MEAN[:channels], STD[:channels]
    planes = torch.empty((3, channels, 17, 31), dtype=dtype)
    normalize_into(pixels, mean, std, planes)
    assert torch.equal(expected.permute(0, 3, 1, 2), planes)
    channels_last = torch.empty((3, channels, 17, 31), dtype=dtype, memory_format=torch.channels_last)
    normalize_into(pixels, mean, std, channels_last)
    assert torch.equal(planes, channels_last)
    rows = torch.empty((3, 17, 31, channels), dtype=dtype)
    normalize_into(pixels, mean, std, rows, "NHWC")
    assert torch.equal(expected, rows)


def test_a_part_of_a_larger_slab_is_read_and_written_alone():
    slab = torch.full((5, 17, 31, 3), 9, dtype=torch.uint8)
    slab[1:4] = images(3)
    out = torch.full((5, 3, 17, 31), 7.0)
    normalize_into(slab[1:4], MEAN[:3], STD[:3], out[1:4])
    assert torch.equal(formula(images(3)).float().permute(0, 3, 1, 2), out[1:4])
    assert (out[::4] == 7).all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_cuda_the_values_are_within_two_units_in_the_last_place(dtype):
    pixels = images(3, "cuda")
    expected = formula(pixels).permute(0, 3, 1, 2)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        out = torch.empty((3, 3, 17, 31), dtype=dtype, device="cuda", memory_format=memory_format)
        normalize_into(pixels, MEAN[:3], STD[:3], out)
        assert (out.cpu().double() - expected).abs().max() <= 2 * torch.finfo(dtype).eps * 2.0
