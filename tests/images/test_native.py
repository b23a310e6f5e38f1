"""The compiled decoder: the bytes, crops, errors and states are those without it."""

from __future__ import annotations

import io

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.operators.images import native

pytestmark = pytest.mark.skipif(native._functions() is None, reason="it is not compiled")


def scene(height: int, width: int, seed: int) -> np.ndarray:
    """Smooth, with some grain."""
    rng = np.random.default_rng(seed)
    coarse = cv2.resize(
        rng.integers(30, 226, (4, 5, 3)).astype(np.uint8), (width, height), interpolation=cv2.INTER_CUBIC
    )
    return np.clip(coarse + rng.normal(0, 3, coarse.shape), 0, 255).astype(np.uint8)


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def jpeg(number: int, mode: str = "RGB", scale: int = 1, **options) -> bytes:
    stream = io.BytesIO()
    image = Image.fromarray(scene((61 + 17 * number) * scale, (97 + 11 * number) * scale, number))
    image.convert(mode).save(stream, "JPEG", **options)
    return stream.getvalue()


def every_kind() -> list[bytes]:
    made = [
        jpeg(1),
        jpeg(2, "L"),
        jpeg(3, "CMYK"),
        jpeg(4, scale=5),
        jpeg(5, scale=9),
        jpeg(6, restart_marker_rows=1),
    ]
    made += [jpeg(n, subsampling=n % 3, progressive=n > 2, quality=60 + 5 * n) for n in range(6)]
    return made + [jpeg(n, exif=turned(n)) for n in range(1, 9)]


def delivered(
    images, backend="auto", size=(40, 32), mode="RGB", crop=None, batch=5, place="thread", normalise=None
):
    graph = pg.Graph("decoded", seed=3)
    node = graph.add(ops.FromSequence([{"key": str(n), "jpg": data} for n, data in enumerate(images)]))
    node = node.then(ops.Batch(batch)) if batch else node
    crop = crop or ops.RandomResizedCrop((0.05, 1.0))
    decode = ops.DecodeImage(size, crop=crop, flip=0.5, backend=backend, mode=mode)
    node = node.then(decode, workers=2, backend=place, on_error=pg.Skip())
    if normalise is not None:
        node.then(ops.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4), **normalise))
    assert ("compiled" in str(graph.plan())) == (backend == "auto")
    with graph.loader() as loader:
        images = [item["image"] for item in loader]
        lost = [(each.key, each.error) for each in loader.profile().quarantined]
    return torch.cat(images) if batch else images, lost


@pytest.mark.parametrize("size", [(40, 32), (224, 224), (7, 90)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("crop", [None, ops.CenterCrop(256)])
def test_the_pixels_are_those_of_opencv(size, mode, crop):
    ours, lost = delivered(every_kind(), size=size, mode=mode, crop=crop)
    assert torch.equal(ours, delivered(every_kind(), "opencv", size, mode, crop)[0]) and not lost


@pytest.mark.parametrize("place", ["thread", "process"])
@pytest.mark.parametrize("batch", [5, 0])
def test_they_are_the_same_sample_by_sample_and_in_processes(place, batch):
    ours, theirs = (
        delivered(every_kind(), backend, batch=batch, place=place)[0] for backend in ("auto", "opencv")
    )
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_normalised_too(dtype, layout):
    options = {"normalise": {"dtype": dtype, "layout": layout}}
    assert torch.equal(delivered(every_kind(), **options)[0], delivered(every_kind(), "opencv", **options)[0])


def test_damaged_files_are_judged_as_without_it():
    """Bytes that were changed, cut out or cut off: the same are left out for the same reason, and the others equal."""
    rng, images = np.random.default_rng(5), []
    # Of a progressive one OpenCV refuses some that others decode.
    kinds = [data for data in every_kind() if b"\xff\xc2" not in data]
    for number, whole in enumerate(kinds * 15):
        data = bytearray(whole)
        at = int(rng.integers(2, len(data)))
        match number % 4:
            case 0:
                data[at] ^= 1 << int(rng.integers(8))
            case 1:
                data[at : at + 40] = rng.bytes(40)
            case 2:
                del data[at : at + 9]
            case 3:
                del data[at:]
        images.append(bytes(data))
    ours, lost = delivered(images)
    theirs, lost_without = delivered(images, "opencv")
    assert torch.equal(ours, theirs)
    assert lost == lost_without and len(lost) > 50
