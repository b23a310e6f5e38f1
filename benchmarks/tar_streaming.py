"""Reading tar shards of images against the raw bytes, Python's tarfile and WebDataset's reader.

Claim: samples come from a tar shard several times as fast as through tarfile, and for
images of 100 kB near the speed of reading the file.

Shards are WebDataset-style (``.jpg`` and ``.cls`` per sample, random bytes), lie in the page cache,
and are read over and over. ``raw pieces`` reads the file in pieces of 256 KiB, ``raw members``
preads each field at offsets known beforehand: what Python can do at best.

    python benchmarks/tar_streaming.py --jpeg 10000
"""

from __future__ import annotations

import argparse
import io
import os
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import harness

from pipegraph.storage.formats import format_of
from pipegraph.storage.formats.tarheader import members
from pipegraph.storage.shard_files import LocalFile

CLAIM = "tar samples come several times as fast as through tarfile"
SHARD_NBYTES = 200_000_000
PIECE = 1 << 18


def write_shard(path: Path, jpeg: int) -> int:
    """A shard of about 200 MB; the number of samples."""
    rng = random.Random(0)
    data = rng.randbytes(2 * jpeg)
    count = SHARD_NBYTES // (jpeg + 2048)
    with tarfile.open(path, "w") as archive:
        for i in range(count):
            for field, body in (("jpg", data[: rng.randrange(jpeg // 2, 3 * jpeg // 2)]), ("cls", b"7")):
                info = tarfile.TarInfo(f"train/{i:08d}.{field}")
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))
    return count


def raw_pieces(path: Path) -> Iterator[bytes]:
    while True:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(PIECE):
                yield piece


def raw_members(path: Path) -> Iterator[tuple[bytes, bytes]]:
    with LocalFile(path) as file:
        spans = [(d, s) for _, _, d, s in members(file.read_at, 0, file.size, file.name, marker=True)]
    fd = os.open(path, os.O_RDONLY)
    try:
        while True:
            for i in range(0, len(spans), 2):
                (a, m), (b, n) = spans[i], spans[i + 1]
                yield os.pread(fd, m, a), os.pread(fd, n, b)
    finally:
        os.close(fd)


def streamed(path: Path) -> Iterator[dict[str, Any]]:
    while True:
        with LocalFile(path) as file:
            yield from format_of(path.name).samples(file)


def shuffled(path: Path) -> Iterator[dict[str, Any]]:
    form = format_of(path.name)
    with LocalFile(path) as file:
        blocks = [form.read(file, block) for block in form.index(file)]
        order = [(block, i) for block in blocks for i in range(len(block))]
        random.Random(0).shuffle(order)
        while True:
            for block, i in order:
                yield block[i]


def through_tarfile(path: Path) -> Iterator[dict[str, bytes]]:
    while True:
        with tarfile.open(path) as archive:
            sample: dict[str, bytes] = {}
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None
                sample[member.name.rpartition(".")[2]] = file.read()
                archive.members = []  # else it keeps every header
                if len(sample) == 2:
                    yield sample
                    sample = {}


def through_webdataset(path: Path) -> Iterator[Any]:
    import webdataset

    while True:
        yield from webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.tar"
        samples = write_shard(path, options.jpeg)
        megabytes = path.stat().st_size / 1e6
        for _ in zip(raw_pieces(path), range(int(path.stat().st_size // PIECE)), strict=False):
            pass  # into the page cache

        def contestant(
            name: str, stream: Callable[[Path], Iterable[Any]], items: float, timed: float
        ) -> harness.Contestant:
            @contextmanager
            def opened() -> Iterator[Iterable[Any]]:
                with nullcontext(stream(path)) as items_:
                    yield items_
                    items_.close()  # type: ignore[attr-defined]

            return harness.Contestant(name, opened, int(items * 0.1), int(items * timed), megabytes / items)

        contestants = [
            contestant("raw pieces", raw_pieces, path.stat().st_size / PIECE, 3),
            contestant("raw members", raw_members, samples, 2),
            contestant("pipegraph, streamed", streamed, samples, 2),
            contestant("pipegraph, shuffled access", shuffled, samples, 2),
            contestant("tarfile", through_tarfile, samples, 0.5),
            contestant("webdataset", through_webdataset, samples, 0.5),
        ]
        configuration = {"jpeg_bytes": options.jpeg, "samples": samples, "shard_mb": round(megabytes, 1)}
        harness.header(CLAIM, configuration)
        result = harness.race(harness.chosen(contestants, options.only), options.rounds)
        print(harness.rate_table(result, ["raw pieces", "tarfile"], "MB"))
        if not options.no_record:
            summary = harness.summary(result, ["raw pieces", "tarfile"])
            print("recorded in", harness.record("tar_streaming", CLAIM, configuration, summary).name)


if __name__ == "__main__":
    parser = harness.arguments(__doc__)
    parser.add_argument("--jpeg", type=int, default=100_000, help="mean bytes per image (default 100000)")
    main(parser.parse_args())
