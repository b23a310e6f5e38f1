"""How far a pass of a data loader has got: what its state describes.

For indices the state holds the random state from which the sampler drew the epoch's order, and how many batches were
delivered: a resumed pass draws the same order and begins behind them, without reading a sample. For an iterable it
holds what each worker's copy says of itself, or else how many batches of it were delivered, which are read again.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from pipegraph.errors import StateError

VERSION = 1


class BatchProgress:
    """One pass.

    Args:
        workers: of an iterable's copies; 0 for a map-style data set.

    Attributes:
        batches: delivered so far in this epoch.
        base_seed: of the workers.
        finished: whether the loop has run to its end.
        copies: of an iterable, for each worker the batches delivered and where its copy stands, if it says so.
        turn: of an iterable, the worker whose batch is next.
    """

    def __init__(self, workers: int = 0) -> None:
        self.batches = 0
        self.base_seed: int | None = None
        self.finished = False
        self.order: dict[str, str] = {}
        self.copies: list[tuple[int, Any]] = [(0, None)] * workers
        self.turn = 0

    def state(self) -> dict[str, Any]:
        """With a fixed set of keys; JSON where the data set's own states are."""
        return {
            "version": VERSION,
            "batches": self.batches,
            "base_seed": self.base_seed,
            "order": dict(self.order),
            "copies": [list(each) for each in self.copies],
            "turn": self.turn,
        }

    @staticmethod
    def of(state: Any, workers: int) -> BatchProgress:
        """From a state.

        Raises:
            StateError: it is none, or of an iterable with another number of workers.
        """
        if not isinstance(state, dict) or "batches" not in state or "copies" not in state:
            raise StateError("this is not the state of a pg.DataLoader: it has no 'batches' and 'copies'")
        if state["version"] != VERSION:
            raise StateError(
                f"the state has version {state['version']!r}, this pipegraph reads version {VERSION}"
            )
        if len(state["copies"]) != workers:
            raise StateError(
                f"the state has {len(state['copies'])} copies of an iterable data set, this loader has {workers}: each "
                f"worker continues its own; resume with num_workers={max(0, len(state['copies']))}"
            )
        made = BatchProgress()
        made.batches, made.base_seed = state["batches"], state["base_seed"]
        made.order = dict(state["order"])
        made.copies = [(done, kept) for done, kept in state["copies"]]
        made.turn = state["turn"]
        return made


class Indices:
    """The indices of one epoch, drawn from a sampler; notes the random state that they are drawn from.

    Args:
        sampler: a loader's ``batch_sampler``, or its ``sampler``.
        progress: where the state is noted; one that was restored says where to begin.
    """

    def __init__(self, sampler: Any, progress: BatchProgress) -> None:
        self._sampler = sampler
        self._progress = progress
        self._drawn: Iterator[Any] | None = None

    def __iter__(self) -> Indices:
        return self

    def __next__(self) -> Any:
        if self._drawn is None:
            progress = self._progress
            generator = _generator_of(self._sampler)
            with _restored(generator, progress.order):
                if not progress.order:
                    progress.order = _random_state(self._sampler, generator)
                self._drawn = _behind(self._sampler, progress.batches)
                return next(self._drawn)  # most samplers draw the whole order here
        return next(self._drawn)


def _behind(sampler: Any, batches: int) -> Iterator[Any]:
    """What a sampler gives behind some batches."""
    if not batches:
        return iter(sampler)
    if type(sampler) is BatchSampler:
        inner = _Behind(sampler.sampler, batches * sampler.batch_size)
        return iter(BatchSampler(inner, sampler.batch_size, sampler.drop_last))
    return iter(_Behind(sampler, batches))


class _Behind:
    """A sampler without its first indices."""

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self._sampler = sampler
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        if type(self._sampler) is SequentialSampler:
            return iter(range(self._count, len(self._sampler)))
        return islice(iter(self._sampler), self._count, None)


def _generator_of(sampler: Any) -> torch.Generator | None:
    """The generator that a sampler, or the one that it batches, draws from."""
    while sampler is not None:
        found = getattr(sampler, "generator", None)
        if isinstance(found, torch.Generator):
            return found
        sampler = getattr(sampler, "sampler", None)
    return None


def _draws_nothing(sampler: Any) -> bool:
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in (SequentialSampler, DistributedSampler, list, tuple, range)


def _random_state(sampler: Any, generator: torch.Generator | None) -> dict[str, str]:
    if generator is not None:
        return {"generator": _text(generator.get_state())}
    return {"none": ""} if _draws_nothing(sampler) else {"global": _text(torch.get_rng_state())}


@contextlib.contextmanager
def _restored(generator: torch.Generator | None, order: dict[str, str]) -> Iterator[None]:
    """While a restored order is drawn the generator stands where it stood then; the global one only so long."""
    if "generator" in order and generator is not None:
        generator.set_state(_tensor(order["generator"]))
    if "global" not in order:
        yield
        return
    now = torch.get_rng_state()
    torch.set_rng_state(_tensor(order["global"]))
    try:
        yield
    finally:
        torch.set_rng_state(now)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
