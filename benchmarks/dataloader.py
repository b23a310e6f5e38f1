"""``pg.DataLoader`` beside torch's ``DataLoader`` with the same arguments: two workers, what a script would give both.

Claim: ahead of torch's on images, tokens, small dicts and samples of 32 MB.

    python benchmarks/dataloader.py --rounds 5            # all four
    python benchmarks/dataloader.py --data images
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class Endless(torch.utils.data.Dataset[Any]):
    """A map-style dataset that does not end, of samples that no decoding hides the loader behind."""

    def __init__(self, batch: int, timed: int, sample: Callable[[int], Any]) -> None:
        self.batch, self.timed, self.sample = batch, timed, sample

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


def images() -> Endless:
    """Float images of 3 x 224 x 224 with a label, each a copy of one in memory."""
    held = np.random.default_rng(0).random((16, 3, 224, 224), np.float32)
    return Endless(32, 60, lambda index: (held[index % 16].copy(), index % 1000))


def tokens() -> Endless:
    """Windows of 2,048 tokens."""
    held = torch.from_numpy(np.random.default_rng(0).integers(0, 50_000, 1 << 22, np.int64))
    return Endless(16, 1500, lambda index: held[(start := index * 2048 % (len(held) - 2048)) : start + 2048])


def small_dicts() -> Endless:
    """What a batch costs that holds next to nothing."""
    return Endless(64, 1500, lambda index: {"x": index / 3, "y": index % 10, "name": "row"})


def large() -> Endless:
    """Samples of 32 MB, one by one."""
    held = torch.zeros(8 << 20)
    return Endless(1, 40, lambda index: held + index)


DATA = {"images": images, "tokens": tokens, "small dicts": small_dicts, "32 MB samples": large}


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
    parser = harness.arguments(__doc__)
    parser.add_argument("--data", choices=list(DATA), help="one of the four")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of timed batches")
    options = parser.parse_args()
    for name in [options.data] if options.data else DATA:
        dataset = DATA[name]()
        configuration = {"data": name, "workers": WORKERS, "batch": dataset.batch}
        entered = contestants(dataset, options.scale)
        script = f"dataloader_{name.replace(' ', '_').lower()}"
        harness.compare(script, f"{CLAIM} on {name}", configuration, entered, check, [TORCH], options)


if __name__ == "__main__":
    main()
