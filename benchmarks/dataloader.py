"""``pg.DataLoader`` beside torch's ``DataLoader`` with the same arguments: two workers, what a script would give both.

Claim: ahead of torch's on images, tokens, small dicts and samples of 32 MB.

    python benchmarks/dataloader.py --rounds 5            # all four
    python benchmarks/dataloader.py --data images
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import harness
import numpy as np
import torch
from harness import Contestant

CLAIM = "pg.DataLoader: ahead of torch's DataLoader with the same arguments"
TORCH = "torch's DataLoader"
WORKERS = 2


class Images(torch.utils.data.Dataset[Any]):
    """Float images of 3 x 224 x 224 with a label, each a copy of one in memory: no decoding hides the loader."""

    batch, timed = 32, 60

    def __init__(self) -> None:
        self.images = np.random.default_rng(0).random((16, 3, 224, 224), np.float32)

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> Any:
        return self.images[index % 16].copy(), index % 1000


class Tokens(torch.utils.data.Dataset[Any]):
    """Windows of 2,048 tokens."""

    batch, timed = 16, 1500

    def __init__(self) -> None:
        self.tokens = np.random.default_rng(0).integers(0, 50_000, 1 << 22, np.int64)

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> Any:
        start = index * 2048 % (len(self.tokens) - 2048)
        return torch.from_numpy(self.tokens[start : start + 2048])


class Rows(torch.utils.data.Dataset[Any]):
    """Small dicts: what a batch costs that holds next to nothing."""

    batch, timed = 64, 1500

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> Any:
        return {"x": index / 3, "y": index % 10, "name": "row"}


class Large(torch.utils.data.Dataset[Any]):
    """Samples of 32 MB, one by one."""

    batch, timed = 1, 40

    def __init__(self) -> None:
        self.sample = torch.zeros(8 << 20)

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> Any:
        return self.sample + index


DATA: dict[str, Any] = {"images": Images, "tokens": Tokens, "small dicts": Rows, "32 MB samples": Large}


@contextmanager
def stream(kind: Any, dataset: Any, **options: Any) -> Iterator[Any]:
    """An endless pass."""
    sampler = range(1 << 40)
    passing = iter(kind(dataset, dataset.batch, sampler=sampler, num_workers=WORKERS, **options))
    yield passing
    del passing


def contestants(dataset: Any, scale: float) -> list[Contestant]:
    """Both, and ours in threads."""
    import pipegraph as pg

    timed = max(4, int(dataset.timed * scale))
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        TORCH: (torch.utils.data.DataLoader, {}),
        "pg.DataLoader": (pg.DataLoader, {}),
        'pg.DataLoader, workers="thread"': (pg.DataLoader, {"workers": "thread"}),
    }
    return [
        Contestant(name, partial(stream, kind, dataset, **options), max(4, timed // 5), timed, dataset.batch)
        for name, (kind, options) in kinds.items()
    ]


def check(contestant: Contestant) -> str:
    """That it gives batches."""
    with contestant.stream() as passing:
        batch = next(passing)
    return f"{type(batch).__name__} of {contestant.weight:g} samples"


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--data", choices=list(DATA), help="one of the four")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of timed batches")
    options = parser.parse_args()
    for name, data in DATA.items():
        if options.data in (None, name):
            dataset = data()
            configuration = {
                "data": name,
                "workers": WORKERS,
                "batch": dataset.batch,
                "rounds": options.rounds,
            }
            entered = contestants(dataset, options.scale)
            harness.compare(
                f"dataloader_{name.replace(' ', '_').lower()}",
                f"{CLAIM} on {name}",
                configuration,
                entered,
                check,
                [TORCH],
                "samples",
                options,
            )


if __name__ == "__main__":
    main()
