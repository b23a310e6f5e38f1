"""Semantic segmentation: photographs and masks that follow the same crop and flip.

Reads pairs NAME.jpg and NAME.png of one folder; a mask's pixels are classes, 255 is ignored.

python examples/segmentation.py --data pairs
python examples/segmentation.py --smoke
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

import pipegraph as pg
from pipegraph import operators as ops


class Pairs(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.photos = sorted(Path(folder).glob("*.jpg"))

    def __len__(self):
        return len(self.photos)

    def __getitem__(self, index):
        photo = self.photos[index]
        return {"key": photo.stem, "jpg": photo.read_bytes(), "mask": photo.with_suffix(".png").read_bytes()}


def pipeline(folder, size, batch_size, device):
    graph = pg.Graph("segmentation", seed=7)
    pairs = graph.add(ops.FromSequence(Pairs(folder), shuffle=True), name="pairs", workers=4)
    batches = pairs.then(ops.Batch(batch_size, drop_last=True), name="batch")
    decode = ops.DecodeImage(
        size, field="jpg", crop=ops.RandomResizedCrop((0.5, 1.0)), flip=0.5, masks="mask"
    )
    images = batches.then(decode, name="decode", workers=4)
    ready = images.then(ops.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), name="normalize")
    ready.then(ops.Pin(), name="pin").then(ops.CopyToDevice(device), name="copy")
    return graph


def network(classes):
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, classes, 1), nn.Upsample(scale_factor=2, mode="bilinear")),
    )


def main(arguments):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = network(arguments.classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    graph = pipeline(arguments.data, arguments.size, arguments.batch_size, device)
    with graph.loader(epochs=arguments.epochs) as loader:
        for epoch in range(arguments.epochs):
            for batch in loader:  # image: float32 (N, 3, H, W), mask: (N, H, W)
                loss = F.cross_entropy(model(batch["image"]), batch["mask"].long(), ignore_index=255)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}")
        print(loader.profile())


def draw_pairs(folder):
    rng = np.random.default_rng(7)
    for number in range(48):
        photo, mask = rng.integers(0, 80, (64, 80, 3), np.uint8), np.zeros((64, 80), np.uint8)
        top, left = rng.integers(0, 32), rng.integers(0, 40)
        photo[top : top + 30, left : left + 36, 0] += 150
        mask[top : top + 30, left : left + 36] = 1
        Image.fromarray(photo).save(folder / f"{number:02d}.jpg")
        Image.fromarray(mask).save(folder / f"{number:02d}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="pairs")
    parser.add_argument("--classes", type=int, default=21)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--smoke", action="store_true", help="three epochs on drawn pairs, in seconds")
    arguments = parser.parse_args()
    if arguments.smoke:
        with tempfile.TemporaryDirectory() as folder:
            draw_pairs(Path(folder))
            arguments.data = folder
            arguments.classes, arguments.size, arguments.batch_size, arguments.epochs = 2, 32, 8, 3
            main(arguments)
    else:
        main(arguments)
