"""An evaluation loop: every image once on any number of ranks, unreadable ones counted and left out.

torchrun --nproc-per-node=8 examples/evaluate.py --data imagenet/val
python examples/evaluate.py --smoke
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from torch import nn

import pipegraph as pg
from pipegraph import operators as ops


def pipeline(folder, size, batch_size, device):
    graph = pg.Graph("evaluate")
    files = graph.add(ops.ListFiles(folder, shuffle=False), name="list")
    batches = files.then(ops.Load(), name="load", workers=4).then(ops.Batch(batch_size), name="batch")
    decode = ops.DecodeImage(size, crop=ops.CenterCrop(size * 8 // 7), interpolation="antialias")
    images = batches.then(decode, name="decode", workers=4, on_error=pg.Skip(budget=0.05))
    ready = images.then(ops.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), name="normalize")
    ready.then(ops.Pin(), name="pin").then(ops.CopyToDevice(device), name="copy")
    return graph


def evaluate(model, graph, samples):
    """(right, seen) over all ranks; places that pad a rank's share to equal length are not counted."""
    right = seen = 0
    model.eval()
    with torch.no_grad(), graph.loader() as loader:
        for chunk in loader.chunks():
            real = torch.as_tensor(chunk.positions) < samples
            found = (model(chunk.data["image"]).argmax(1) == chunk.data["label"]).cpu()
            right += int(found[real].sum())
            seen += int(real.sum())
        for entry in loader.profile().quarantined:
            print(f"left out: {entry}")
    counts = torch.tensor([right, seen])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts)
    return counts.tolist()


def main(folder, model, size, batch_size, device):
    samples = sum(path.is_file() for path in Path(folder).glob("*/*"))
    right, seen = evaluate(model.to(device), pipeline(folder, size, batch_size, device), samples)
    print(f"{right} of {seen} right, {samples - seen} left out")
    return right, seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="imagenet/val")
    parser.add_argument("--smoke", action="store_true", help="on drawn images, one of them broken")
    arguments = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.smoke:
        from pipegraph.cli.demo import make_files

        torch.manual_seed(0)
        model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 8))
        with tempfile.TemporaryDirectory() as folder:
            make_files(folder)
            broken = next(iter(sorted(Path(folder, "photos").glob("*/*.jpg"))))
            broken.write_bytes(b"no image")
            assert main(f"{folder}/photos", model, 32, 16, device)[1] == 191
    else:
        model = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 1000))  # your model
        main(arguments.data, model, 224, 256, device)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
