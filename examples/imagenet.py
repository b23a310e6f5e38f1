"""ImageNet classification on one device or, under torchrun, with DDP.

python examples/imagenet.py --train imagenet/train --val imagenet/val --epochs 90
torchrun --nproc-per-node=8 examples/imagenet.py --train 'shards/train-{0000..1281}.tar' --val imagenet/val
python examples/imagenet.py --smoke
"""

import argparse
import os
import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import pipegraph as pg
from pipegraph import operators as ops

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pipeline(data, size, batch_size, device, train):
    graph = pg.Graph("train" if train else "val", seed=7)
    if ".tar" in data:
        source = graph.add(ops.ShardSelect(data), name="select")
    else:
        source = graph.add(ops.ListFiles(data, shuffle=train), name="list")
    batches = source.then(ops.Load(), name="load", workers=4).then(ops.Batch(batch_size, drop_last=train))
    decode = (
        ops.DecodeImage(size, crop=ops.RandomResizedCrop(), flip=0.5)
        if train
        else ops.DecodeImage(size, crop=ops.CenterCrop(size * 8 // 7), interpolation="antialias")
    )
    images = batches.then(decode, name="decode", workers=os.cpu_count() or 1)
    images = images.then(ops.Normalize(MEAN, STD), name="normalize")
    images.then(ops.Pin(), name="pin").then(ops.CopyToDevice(device), name="copy")
    return graph


def network(classes):
    """A small network; put torchvision.models.resnet50() here."""
    layers, channels = [], 3
    for width in (32, 64, 128, 256):
        layers += [
            nn.Conv2d(channels, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def evaluate(model, graph):
    model.eval()
    correct = seen = 0
    # Every process evaluates all images, so that no padded image is counted twice.
    with torch.no_grad(), graph.loader(rank=0, world_size=1) as loader:
        for batch in loader:
            correct += int((model(batch["image"]).argmax(1) == batch["label"]).sum())
            seen += len(batch["label"])
    model.train()
    return correct / seen


def main(arguments):
    distributed = "WORLD_SIZE" in os.environ
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if distributed:
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    plain = network(arguments.classes).to(device)
    model = DistributedDataParallel(plain) if distributed else plain
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    first = not distributed or torch.distributed.get_rank() == 0

    train = pipeline(arguments.train, arguments.size, arguments.batch_size, device, train=True)
    with train.loader(epochs=arguments.epochs) as loader:
        if os.path.exists(arguments.checkpoint):
            saved = torch.load(arguments.checkpoint, map_location=device, weights_only=True)
            plain.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
            loader.load_state_dict(saved["loader"])
        for epoch in range(loader.epoch, arguments.epochs):
            for batch in loader:
                loss = F.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
            if first:
                state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"schedule": schedule.state_dict(), "loader": loader.state_dict()}
                torch.save(state, arguments.checkpoint)
                val = pipeline(arguments.val, arguments.size, arguments.batch_size, device, train=False)
                print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {evaluate(plain, val):.3f}")
        if first:
            print(loader.profile())
    if distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", default="imagenet/train", help="a folder of class folders, or tar shards")
    parser.add_argument("--val", default="imagenet/val")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=256, help="of each process")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--checkpoint", default="imagenet.pt")
    parser.add_argument("--smoke", action="store_true", help="two epochs on drawn images, in seconds")
    arguments = parser.parse_args()
    if arguments.smoke:
        from pipegraph.cli.demo import make_files

        with tempfile.TemporaryDirectory() as folder:
            make_files(folder)
            arguments.train = arguments.val = f"{folder}/photos"
            arguments.checkpoint = f"{folder}/imagenet.pt"
            arguments.classes, arguments.size, arguments.batch_size, arguments.epochs = 8, 32, 16, 2
            main(arguments)
    else:
        main(arguments)
