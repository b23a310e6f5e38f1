"""The state of a ``pg.DataLoader``, and with which position its next pass begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch.utils.data
from torch.utils.data import RandomSampler, SequentialSampler, _DatasetKind

from pipegraph.loader.ranks import resolve
from pipegraph.loader.torch_dataloader.batch_progress import (
    BatchProgress,
    keeps_state,
    random_state,
    replicas_of,
    restore_random_state,
    tensor_of,
    text_of,
)
from pipegraph.loader.torch_dataloader.in_accelerate import loaded_by_accelerate

_T_co = TypeVar("_T_co", covariant=True)


class ResumableDataLoader(torch.utils.data.DataLoader[_T_co]):
    """Torch's ``DataLoader`` with a state.

    Attributes:
        workers: what ``num_workers`` counts, ``"process"`` or ``"thread"``.
    """

    workers: str
    _progress: BatchProgress  # of the pass that began last
    _restored: BatchProgress | None = None  # with which the next one begins
    _random: torch.Tensor | None = None  # that passes draw from in place of torch's global generator

    def __iter__(self) -> Any:
        if self._random is None:
            return super().__iter__()
        now = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            return super().__iter__()
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(now)

    def _next_progress(self) -> BatchProgress:
        """Of the pass that begins: what was restored, or a new one."""
        found, self._restored = self._restored or self._fresh(), None
        self._progress = found
        return found

    def _fresh(self) -> BatchProgress:
        sampler = self._index_sampler
        shuffle = {RandomSampler: True, SequentialSampler: False}.get(
            type(getattr(sampler, "sampler", sampler))
        )
        options = {"batch_size": getattr(sampler, "batch_size", None), "shuffle": shuffle}
        options["num_replicas"] = replicas_of(sampler)
        if self._dataset_kind == _DatasetKind.Map and not self._copies_have_states:
            return BatchProgress(options)
        copies = 1 if self.workers == "thread" else max(1, self.num_workers)
        return BatchProgress(options, copies=[(0, None)] * copies)

    @property
    def _copies_have_states(self) -> bool:
        """Whether each worker's copy of a map-style data set says where it stands, and always reads the same."""
        in_turn = self.workers == "process" and self.in_order
        return keeps_state(self.dataset) and (self.num_workers == 0 or in_turn)

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was delivered of the pass, as a small dict with a fixed set of keys; thread-safe.

        Inside the loop, and after a ``break``, the rest of the epoch; before and after the loop a whole epoch, with the
        random states that its order is drawn from. A map-style data set with ``state_dict`` and ``load_state_dict`` is
        asked for its state in each worker, an iterable too; outside of the loop none is asked, so that no worker starts
        for it. JSON, unless such a state is not.
        """
        return self._state()

    def _state(self, ended: bool = False) -> dict[str, Any]:
        """The state; ``ended``: as if the pass had run to its end."""
        rank, _ = resolve(None, None)
        if self._restored is not None:
            return self._restored.state(rank)
        progress = self._progress
        indexed = self._dataset_kind == _DatasetKind.Map
        begun = progress.base_seed is not None
        if ended or progress.finished or not begun:
            lasting = progress.base_seed if self._iterator is not None else None  # of persistent workers
            progress = self._fresh()
            progress.base_seed = lasting
            progress.before = random_state(self._index_sampler) if indexed else {"none": ""}
            if self.generator is not None:
                progress.before["base"] = text_of(self.generator.get_state())
        elif indexed and not progress.order:  # it is drawn with the first batch
            progress = replace(progress, order=random_state(self._index_sampler))
        return progress.state(rank)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass delivers exactly what followed the state.

        For a map-style data set without reading what came before, at any ``num_workers`` (unless the data set has a
        state of its own). An iterable is asked for its ``load_state_dict``, in each worker; without one it is read
        again up to where it stood. A state of a whole epoch puts back the generators that its order is drawn from, also
        torch's global one; seed them after this call to have another order.

        Raises:
            StateError: the state is no data loader's, of copies with states in another number of workers, or of the
                middle of an epoch with another ``batch_size`` or ``shuffle``.
        """
        loaded_by_accelerate(state)
        self._restored = restored = BatchProgress.of(state, self._fresh(), resolve(None, None)[0])
        self._iterator = None
        before = restored.before
        if "base" in before and self.generator is not None:
            self.generator.set_state(tensor_of(before["base"]))
        if "global" in before:
            torch.set_rng_state(tensor_of(before["global"]))
        if self._dataset_kind == _DatasetKind.Map:
            restore_random_state(self._index_sampler, before)

    def _base_state(self) -> torch.Tensor:
        """Of the generator that a pass draws its base seed from."""
        return torch.get_rng_state() if self.generator is None else self.generator.get_state()

    def _put_base_state(self, state: torch.Tensor) -> None:
        if self.generator is None:
            torch.set_rng_state(state)
        else:
            self.generator.set_state(state)
