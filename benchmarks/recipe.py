"""The ImageNet training recipe in the ways one can write it by hand: random resized crop to 224, flip,
normalise.

Every function draws its own crop from the same distribution (torchvision's ``RandomResizedCrop``), so
runs differ in their crops but not in their work.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from images import SIZE

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def draw_crop(height: int, width: int) -> tuple[int, int, int, int]:
    """(top, left, height, width): area 0.08-1 of the image, aspect 3/4-4/3, ten tries, else the centre."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1.0)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def opencv_crop(data: bytes) -> Any:
    """The usual OpenCV way: full decode, crop, resize, flip. RGB uint8 (SIZE, SIZE, 3)."""
    import cv2

    image: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    top, left, height, width = draw_crop(*image.shape[:2])
    resized = cv2.resize(image[top : top + height, left : left + width], (SIZE, SIZE))
    return cv2.flip(resized, 1) if random.random() < 0.5 else resized


def opencv_crop_path(path: str) -> Any:
    """``opencv_crop`` of a file."""
    with open(path, "rb") as file:
        return opencv_crop(file.read())


def normalise(images_NHWC: Any) -> Any:
    """The usual normalisation with torch, a batch at a time: uint8 (N, H, W, 3) to float32 (N, 3, H, W)."""
    return normalise_planes(images_NHWC.permute(0, 3, 1, 2))


def normalise_planes(images_NCHW: Any) -> Any:
    """The same for uint8 (N, 3, H, W); contiguous float32."""
    import torch

    mean = torch.tensor(MEAN).view(3, 1, 1) * 255
    std = torch.tensor(STD).view(3, 1, 1) * 255
    floats = images_NCHW.to(torch.float32, memory_format=torch.contiguous_format)
    return floats.sub_(mean).div_(std)


def opencv_batch(paths: Sequence[str]) -> Any:
    """A batch of paths to the recipe's float32 batch, with ``opencv_crop`` and ``normalise``."""
    import torch

    images = np.empty((len(paths), SIZE, SIZE, 3), np.uint8)
    for row, path in enumerate(paths):
        images[row] = opencv_crop_path(path)
    return normalise(torch.from_numpy(images))


def collate(images: Sequence[Any]) -> Any:
    """Decoded uint8 images to the recipe's float32 batch."""
    import torch

    return normalise(torch.from_numpy(np.stack(images)))


def pillow_sample(path: str) -> Any:
    """torchvision's steps on Pillow images, a sample at a time: float32 (3, SIZE, SIZE)."""
    import torch
    from PIL import Image

    with open(path, "rb") as file:
        image = Image.open(file).convert("RGB")
    top, left, height, width = draw_crop(image.height, image.width)
    image = image.crop((left, top, left + width, top + height))
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    floats = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32).div_(255)
    return floats.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))


def tables() -> Any:
    """What each of 256 values becomes, per channel: float32 (3, 256)."""
    values = np.arange(256, dtype=np.float32) / 255
    mean, deviation = (np.array(numbers, np.float32)[:, None] for numbers in (MEAN, STD))
    return (values[None] - mean) / deviation


def planes(image_HWC: Any, table: Any, row: Any) -> None:
    """Flip half of the time, then look every value up, plane by plane, into row (3, SIZE, SIZE)."""
    import cv2

    if random.random() < 0.5:
        image_HWC = cv2.flip(image_HWC, 1)
    for channel, plane in enumerate(cv2.split(image_HWC)):
        cv2.LUT(plane, table[channel], dst=row[channel])


def make_opencv_fill() -> Callable[[str, Any], None]:
    """The ideal with OpenCV: as ``opencv_crop``, normalised by table straight into the batch.

    A region at least twice as large as the target is decoded at half or a quarter of its scale, as the
    header's size allows to know beforehand.
    """
    import cv2
    from PIL import Image

    table = tables()

    def fill(path: str, row: Any) -> None:
        with open(path, "rb") as file:
            data = file.read()
        with Image.open(io.BytesIO(data)) as header:
            size = header.height, header.width
        top, left, height, width = draw_crop(*size)
        scale, flag = 1, cv2.IMREAD_COLOR_RGB
        if min(height, width) >= 4 * SIZE:
            scale, flag = 4, cv2.IMREAD_REDUCED_COLOR_4
        elif min(height, width) >= 2 * SIZE:
            scale, flag = 2, cv2.IMREAD_REDUCED_COLOR_2
        image: Any = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
        if flag != cv2.IMREAD_COLOR_RGB:
            image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        top, left, height, width = (value // scale for value in (top, left, height, width))
        planes(cv2.resize(image[top : top + height, left : left + width], (SIZE, SIZE)), table, row)

    return fill


def make_region_fill() -> Callable[[str, Any], None]:
    """The ideal with nvImageCodec on the CPU: only the region of interest is decoded, then as above."""
    import cv2
    from nvidia import nvimgcodec as nv

    decoder = nv.Decoder(
        device_id=nv.NVIMGCODEC_DEVICE_CPU_ONLY,
        backends=[nv.Backend(nv.BackendKind.CPU_ONLY)],
        max_num_cpu_threads=1,
    )
    table = tables()

    def fill(path: str, row: Any) -> None:
        with open(path, "rb") as file:
            stream = nv.CodeStream(file.read())
        top, left, height, width = draw_crop(stream.height, stream.width)
        region = nv.Region(top, left, top + height, left + width)
        image = decoder.decode(stream.get_sub_code_stream(region=region))
        if image is None:
            # The header and the EXIF orientation disagree about which side is the width: decode it whole.
            pixels = np.asarray(decoder.decode(stream))
            top, left, height, width = draw_crop(*pixels.shape[:2])
            pixels = pixels[top : top + height, left : left + width]
        else:
            pixels = np.asarray(image)
        planes(cv2.resize(pixels, (SIZE, SIZE)), table, row)

    return fill
