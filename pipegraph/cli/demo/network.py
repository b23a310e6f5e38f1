"""The small networks of the demo: a classifier, and one without labels.

Legend: N samples, H height, W width, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import convert_conv2d_weight_memory_format

WIDTHS = (16, 32, 64, 96)
THUMBNAIL = 16


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
    """Names the class of an image."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.encoder = _encoder()
        self.head = nn.Linear(2 * WIDTHS[-1], classes)

    def forward(self, part: dict[str, Any]) -> torch.Tensor:
        """(N, classes) from the part's ``"image"``, uint8 (N, H, W, 3)."""
        features = self.encoder(_floats(part["image"]))
        pooled = torch.cat([features.mean((2, 3)), features.amax((2, 3))], 1)
        named: torch.Tensor = self.head(pooled)
        return named

    def loss(self, outputs: torch.Tensor, part: dict[str, Any]) -> torch.Tensor:
        """Mean cross entropy."""
        return F.cross_entropy(outputs, part["label"].remainder(outputs.shape[1]))


class Autoencoder(nn.Module):
    """Paints an image's thumbnail from 64 numbers: what can be learned without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder()
        self.code = nn.Linear(WIDTHS[-1] * 16, 64)
        self.paint = nn.Linear(64, 3 * THUMBNAIL**2)

    def forward(self, part: dict[str, Any]) -> torch.Tensor:
        """(N, 3, THUMBNAIL, THUMBNAIL) from the part's ``"image"``, uint8 (N, H, W, 3)."""
        features = F.adaptive_avg_pool2d(self.encoder(_floats(part["image"])), 4)
        painted: torch.Tensor = self.paint(F.relu(self.code(features.flatten(1))))
        return painted.view(-1, 3, THUMBNAIL, THUMBNAIL)

    def loss(self, outputs: torch.Tensor, part: dict[str, Any]) -> torch.Tensor:
        """Mean squared error."""
        return F.mse_loss(outputs, F.adaptive_avg_pool2d(_floats(part["image"]), THUMBNAIL))
