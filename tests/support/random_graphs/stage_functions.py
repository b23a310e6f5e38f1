"""The functions, datasets and samplers of random graphs, all pure functions of their item."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

from pipegraph import operators as ops
from pipegraph.contracts import Operator


def items_of(kind: str, count: int) -> list[Any]:
    """What a source delivers: ``"ints"``, dicts with ``"arrays"``, or these ``"keyed"`` by arrays."""
    if kind == "arrays":
        return [{"key": f"k{i}", "x": np.full(1 + i % 5, i % 250, np.int64)} for i in range(count)]
    if kind == "keyed":
        return [{"key": np.array([i, i % 3]), "x": np.full(3, i % 250, np.int64)} for i in range(count)]
    return list(range(count))


class Planned(ValueError):
    """A failure that a recipe asks for."""


def weigh(item: Any) -> int:
    """A number for any item."""
    if isinstance(item, dict):
        return sum(weigh(value) for value in item.values())
    if isinstance(item, list | tuple):
        return sum(weigh(value) for value in item) + len(item)
    if isinstance(item, np.ndarray | torch.Tensor):
        return int(item.sum())
    return int(item)


def _spin(item: Any, delay: int) -> None:
    for _ in range((weigh(item) * 7919 + delay) % (delay + 1)):
        pass


def transform(item: Any, factor: int, delay: int) -> Any:
    """Another item of the same shape, after a while."""
    _spin(item, delay)
    if isinstance(item, dict):
        return {key: transform(value, factor, 0) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)([transform(value, factor, 0) for value in item])
    if isinstance(item, np.ndarray):
        return item * factor % 251
    return (item * 31 + factor) % 10007


async def later(item: Any, factor: int, delay: int) -> Any:
    """As :func:`transform`, once others have had their turns."""
    for _ in range(delay % 3):
        await asyncio.sleep(0)
    return transform(item, factor, delay)


def unchanged(item: Any) -> Any:
    """The item as it is."""
    return item


def draw(item: Any, delay: int, rng: np.random.Generator) -> Any:
    """An item and a random number of its own."""
    _spin(item, delay)
    number = int(rng.integers(1, 1000))
    if number % 3 == 0:  # as functions do that want the same numbers each time
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            return transform(item, int(torch.randint(1000, ())), 0)
    return transform(item, number if number % 3 == 1 else int(torch.randint(1000, ())), 0)


def keep(item: Any, modulus: int) -> bool:
    """Whether a filter keeps an item."""
    return weigh(item) % modulus != 0


def several(item: Any, limit: int) -> Any:
    """Zero to ``limit`` items, one by one."""
    for index in range(weigh(item) % (limit + 1)):
        yield transform(item, index + 1, 0)


def document(item: Any, most: int) -> np.ndarray[Any, Any]:
    """Zero to ``most`` tokens, by the item."""
    weight = weigh(item)
    return np.arange(weight, weight + weight % (most + 1))


def choose(item: Any, outputs: int) -> int:
    """An output of a route."""
    return weigh(item) // 3 % outputs


def fail(item: Any, modulus: int) -> Any:
    """Fails for some items."""
    if weigh(item) % (4 * modulus) == 1:
        raise Planned(f"{weigh(item)} was not wanted")
    return item


class Rough:
    """A dataset in which some items cannot be read; several at once where it ``offers`` that."""

    def __init__(self, count: int, modulus: int, offers: bool) -> None:
        self.items = items_of("ints", count)
        self.modulus = modulus
        if offers:
            self.__getitems__ = self.several

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return fail(self.items[index], self.modulus)

    def several(self, indices: list[int]) -> list[Any]:
        """The items of several indices, if all can be read."""
        return [self[index] for index in indices]


class Turning(Sampler[int]):
    """Draws with replacement, and looks at its epoch as late as it may."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Which epoch is drawn next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(self.epoch)
        yield from (int(rng.integers(self.count)) for _ in range(self.count))

    def __len__(self) -> int:
        return self.count


class Stream:
    """Has a state inside an epoch; each ``iter`` begins anew, but the one after a state was loaded."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.at = self.loaded = 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.loaded = self.loaded, 0
        while self.at < self.count:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["at"]


def sampled_from(count: int, turning: bool) -> ops.FromSequence:
    """A source with a sampler of its own."""
    items = items_of("ints", count)
    drawn = Turning(count) if turning else DistributedSampler(items, 1, 0, seed=count)  # type: ignore[arg-type]
    return ops.FromSequence(items, sampler=drawn)


def drawn_from(count: int, replacement: bool) -> ops.FromSequence:
    """A source with a sampler that draws from a generator."""
    items, generator = items_of("ints", count), torch.Generator().manual_seed(count)
    return ops.FromSequence(items, sampler=RandomSampler(items, replacement, None, generator))  # type: ignore[arg-type]


def fraction(item: Any) -> float:
    """A cost of which sums are rounded."""
    return (1 + weigh(item) % 7) / 10


class Flaky:
    """Fails the first time it meets an item that it does not like."""

    def __init__(self, modulus: int) -> None:
        self.modulus = modulus
        self._seen = threading.local()

    def __call__(self, item: Any) -> Any:
        weight = weigh(item)
        if weight % self.modulus == 1 and getattr(self._seen, "weight", None) != weight:
            self._seen.weight = weight  # the retry comes in the same thread
            raise Planned(f"{weight} was not ready")
        self._seen.weight = None
        return item


class RunningSum(Operator):
    """An operator with a state: it adds the weight of what came before."""

    def __init__(self) -> None:
        self.total = 0

    def process(self, chunk: Any) -> Any:
        self.total = (self.total + weigh(chunk.data)) % 10007
        return chunk.replace((self.total, chunk.data))

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]
