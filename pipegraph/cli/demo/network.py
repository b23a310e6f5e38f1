"""The small network of the demo: a classifier, of the strongest colour where there are no labels.

Legend: N samples, H height, W width, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import convert_conv2d_weight_memory_format

WIDTHS = (16, 32, 64, 96)


def _encoder() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width in WIDTHS:
        layers += [
            nn.Conv2d(channels, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        channels = width
    # Images come as NHWC: kept that way, no layer has to turn them.
    encoder = nn.Sequential(*layers)
    convert_conv2d_weight_memory_format(encoder, torch.channels_last)
    return encoder


def _floats(images_NHWC: torch.Tensor) -> torch.Tensor:
    """uint8 (N, H, W, 3) to float32 (N, 3, H, W) in -1..1."""
    return images_NHWC.permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


class Classifier(nn.Module):
    """Names the class of an image; with 0 ``classes``, the strongest of its colours."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.labelled = classes > 0
        self.encoder = _encoder()
        self.head = nn.Linear(2 * WIDTHS[-1], classes or 3)

    def forward(self, part: dict[str, Any]) -> torch.Tensor:
        """(N, classes) from the part's ``"image"``, uint8 (N, H, W, 3)."""
        features = self.encoder(_floats(part["image"]))
        pooled = torch.cat([features.mean((2, 3)), features.amax((2, 3))], 1)
        named: torch.Tensor = self.head(pooled)
        return named

    def loss(self, outputs: torch.Tensor, part: dict[str, Any]) -> torch.Tensor:
        """Mean cross entropy."""
        wanted = part["label"] if self.labelled else part["image"].float().mean((1, 2)).argmax(1)
        return F.cross_entropy(outputs, wanted.remainder(outputs.shape[1]))
