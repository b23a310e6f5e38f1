"""Claim: ``interpolation="antialias"`` is within one grey level of torchvision's evaluation; what all are, and cost.

    PIPEGRAPH_TEST_IMAGES=FOLDER python benchmarks/interpolation.py

Compares ``CenterCrop(256)`` to 224 with the whole image resized by
``torch.nn.functional.interpolate(antialias=True)``, which is what torchvision's ``Resize`` of a tensor calls, and cut
then. Costs are processor time of one thread, interpolations taken in turn.
"""

from __future__ import annotations

import io
import statistics
from pathlib import Path
from time import thread_time
from typing import Any

import harness
import numpy as np
import torch
from images import photographs
from PIL import Image, ImageOps

from pipegraph.operators.images.backends import open_backend
from pipegraph.operators.images.crop import CenterCrop, crop_window
from pipegraph.operators.images.header import INTERPOLATIONS, Interpolation, probe

RESIZE, SIZE, FILES, TURNS = 256, 224, 60, 5


def torchvisions(data: bytes) -> Any:
    """What ``Resize(256)`` and ``CenterCrop(224)`` show of an image: (SIZE, SIZE, 3) int."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    short, long = sorted((image.height, image.width))
    other = int(RESIZE * long / short)
    height, width = (RESIZE, other) if image.height == short else (other, RESIZE)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    scaled = torch.nn.functional.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
    top, left = round((height - SIZE) / 2.0), round((width - SIZE) / 2.0)
    cut = scaled[0, :, top : top + SIZE, left : left + SIZE]
    return cut.round().clamp(0, 255).permute(1, 2, 0).numpy().astype(int)


def ours(backend: Any, data: bytes, interpolation: Interpolation) -> Any:
    """What ``DecodeImage`` makes of it: (SIZE, SIZE, 3) uint8."""
    header = probe(data)
    out = np.empty((SIZE, SIZE, 3), np.uint8)
    cut = crop_window(CenterCrop(RESIZE), 0.0, *header.size, (SIZE, SIZE), (), interpolation == "antialias")
    backend.decode_into(data, header, cut, out, interpolation=interpolation)
    return out


def main() -> None:
    options = harness.arguments(__doc__, images=True).parse_args()
    paths = [path for path in photographs(options.images) if path.lower().endswith((".jpg", ".jpeg"))]
    files = [Path(path).read_bytes() for path in paths[:FILES]]
    expected = [torchvisions(data) for data in files]
    rows = []
    for name in ("opencv", "simplejpeg", "pillow"):
        backend = open_backend(name)
        spent: dict[str, list[float]] = {kind: [] for kind in INTERPOLATIONS}
        errors: dict[str, list[Any]] = {}
        for _ in range(TURNS):
            for kind in INTERPOLATIONS:
                start = thread_time()
                made = [ours(backend, data, kind) for data in files]
                spent[kind].append(thread_time() - start)
                errors[kind] = [np.abs(a - b) for a, b in zip(made, expected, strict=True)]
        for kind in INTERPOLATIONS:
            means = [float(error.mean()) for error in errors[kind]]
            ratios = [a / b for a, b in zip(spent[kind], spent["linear"], strict=True)]
            row: dict[str, Any] = {
                "backend": name,
                "interpolation": kind,
                "mean": round(statistics.mean(means), 2),
            }
            row |= {
                "worst_image": round(max(means), 2),
                "worst_pixel": int(max(e.max() for e in errors[kind])),
            }
            row |= {"cost": round(statistics.median(ratios), 2)}
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()))
    claim = "antialias is within one grey level of torchvision's evaluation"
    harness.keep("interpolation", claim, {"files": len(files), "turns": TURNS}, {"rows": rows}, options)


if __name__ == "__main__":
    main()
