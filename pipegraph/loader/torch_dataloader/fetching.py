"""How batches are fetched: by torch's own fetchers, behind what a resumed pass has delivered."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import _DatasetKind, get_worker_info

from pipegraph.errors import StateError
from pipegraph.nested_samplers import keeps_state
from pipegraph.parameters import function_name, without_rewind


@dataclass(frozen=True)
class Fetching:
    """How batches are fetched.

    Attributes:
        size: of the batches of an iterable; None gives its items as they are.
        collates: whether an index is a list of indices, and a batch is collated.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    collates: bool
    size: int | None = None
    drop_last: bool = False

    def fetcher(self, kind: int) -> Any:
        create: Any = _DatasetKind.create_fetcher
        return create(kind, self.dataset, self.collates, self.collate, self.drop_last)

    def config(self) -> dict[str, Any]:
        """For the digest of a graph."""
        facts = {"dataset": type(self.dataset).__qualname__, "collate": function_name(self.collate)}
        return {**facts, "size": self.size, "drop_last": self.drop_last}


def behind(items: Iterator[Any], count: int, least: int | None = None) -> Iterator[Any]:
    """The iterator, advanced by the ``count`` items that were delivered of it, or by ``least`` or more.

    Raises:
        StateError: it has fewer.
    """
    came = sum(1 for _ in islice(without_rewind(items), count))
    if came < (count if least is None else least):
        raise StateError(
            f"{count} items of this epoch were delivered before the state was taken, and now there are only {came}: "
            "resume with the dataset and the sampler that it was saved with"
        )
    return items


def begun(fetching: Fetching, done: int, state: Any, fetcher: Any = None) -> Any:
    """Torch's fetcher of an iterable, behind the batches that were delivered.

    Args:
        fetcher: one of which nothing was read yet, if there is one: a dataset may count how often it is iterated.
    """
    if state is not None:
        holder, kept, ended = state
        if isinstance(kept, dict) and "epoch" in kept and hasattr(fetching.dataset, "set_epoch"):
            fetching.dataset.set_epoch(kept["epoch"])  # Hugging Face's take up states of that epoch only
            fetcher = None
        if holder == "dataset":
            fetching.dataset.load_state_dict(kept)
            fetcher = None
        fetcher = fetcher or fetching.fetcher(_DatasetKind.Iterable)
        if holder == "iterator":
            fetcher.dataset_iter.load_state_dict(kept)
        fetcher.ended = ended
        return fetcher
    fetcher = fetcher or fetching.fetcher(_DatasetKind.Iterable)
    _behind_batches(fetcher.dataset_iter, done, fetching.size or 1)
    return fetcher


def _behind_batches(items: Iterator[Any], done: int, size: int) -> Iterator[Any]:
    """Behind ``done`` batches, of which the last may have been short."""
    return behind(items, done * size, (done - 1) * size + 1 if done else 0)


@dataclass(eq=False)
class ReadAgain:
    """An iterable in torch's own workers, behind what each has delivered, the first time that it is iterated there."""

    dataset: Any
    done: list[int]
    """Batches delivered, of each worker."""
    size: int

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        done, self.done[info.id] = self.done[info.id], 0
        return _behind_batches(iter(self.dataset), done, self.size)


def where(fetcher: Any) -> tuple[str, Any, bool] | None:
    """The state of an iterable's iterator, else its own, and whether its last batch has met its end: the state of one
    that has ended may be that of its beginning. None if neither has a state."""
    for name, holder in (("iterator", fetcher.dataset_iter), ("dataset", fetcher.dataset)):
        if keeps_state(holder):
            return name, copy.deepcopy(holder.state_dict()), fetcher.ended
    return None


def where_copy(dataset: Any) -> tuple[str, Any]:
    """The state of a map-style dataset that has one."""
    return "dataset", copy.deepcopy(dataset.state_dict())


def restore_copy(dataset: Any, state: tuple[str, Any] | None) -> None:
    """The inverse of :func:`where_copy`; None leaves it as it is."""
    if state is not None:
        dataset.load_state_dict(state[1])
