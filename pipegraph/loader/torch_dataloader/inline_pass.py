"""The passes of a ``pg.DataLoader`` without workers; and torch's iterators, with a position for the state."""

from __future__ import annotations

import warnings
import weakref
from itertools import chain, islice
from typing import Any

from torch.utils.data import _DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from pipegraph.errors import PipegraphWarning
from pipegraph.loader.torch_dataloader.batch_progress import BatchProgress, Indices
from pipegraph.loader.torch_dataloader.fetching import Fetching, begun, restore_copy, where, where_copy
from pipegraph.nested_samplers import keeps_state


class Noting(_BaseDataLoaderIter):
    """One of torch's iterators, which begins where the loader's state says, and notes there what it delivers."""

    _pins = False
    _held: tuple[Any] | None = None
    _loader: weakref.ref[Any]
    _progress: BatchProgress
    _sampler: Any
    _next_in_torch: Any

    @property
    def _pin_memory(self) -> bool:
        return self._pins

    @_pin_memory.setter
    def _pin_memory(self, wanted: bool) -> None:
        """Not where torch pins nothing for the accelerator: it asks this of MPS alone, and fails at the first batch."""
        why = None
        if wanted:
            from pipegraph.device.accelerator import unpinned

            why = unpinned()
        if why is not None:
            warnings.warn(f"pin_memory=True: {why}; batches stay as they are", PipegraphWarning, stacklevel=5)
        self._pins = wanted and why is None

    @property
    def _index_sampler(self) -> Any:
        """What torch's iterator draws indices from, in each pass."""
        if self._dataset_kind == _DatasetKind.Iterable:
            return self._sampler
        return Indices(self._sampler, self._progress)

    @_index_sampler.setter
    def _index_sampler(self, sampler: Any) -> None:
        self._sampler = sampler

    def _begin_another(self, loader: Any) -> None:
        """A pass with the workers of the one before."""
        self._held = None
        base_seed = self._progress.base_seed
        self._progress = loader._next_progress()
        self._progress.base_seed = base_seed

    def _end_workers(self) -> None:
        """Those of an iterator that begins anew."""

    def _take_up(self) -> None:
        """The loader has loaded a state since this iterator was made."""
        loader = self._loader()
        if loader is None:
            return
        if self._num_yielded == 0 and self._held is None:
            self._end_workers()
            loader._begin_anew(self)
            return
        self._progress.superseded = False
        warnings.warn(
            "load_state_dict was called while an iterator of this pg.DataLoader exists, which has delivered batches "
            "and continues where it was; the loader's next pass, and its state_dict() until then, are at the loaded "
            "state: call iter() again",
            PipegraphWarning,
            stacklevel=3,
        )

    def __next__(self) -> Any:
        if self._progress.superseded and not self._progress.finished:
            self._take_up()
        data = super().__next__()
        self._deliver()
        return data

    def _deliver(self) -> None:
        """Note what ``_next_data`` has returned as delivered: behind torch's code, where a Ctrl-C would lose it."""
        held, self._held = self._held, None
        assert held is not None
        self._note(held[0])

    def _note(self, came: Any) -> None:
        raise NotImplementedError

    def _next_data(self) -> Any:
        if self._held is None:  # else a Ctrl-C came before it was delivered
            try:
                self._held = (self._next_in_torch(),)
            except StopIteration:
                self._progress.finished = True
                raise
        return self._held[0]


class Inline(Noting, _SingleProcessDataLoaderIter):
    """``num_workers=0``: torch's own loop, in the consumer's thread, with a state."""

    _next_in_torch = _SingleProcessDataLoaderIter._next_data

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)
        self._progress = progress = loader._next_progress()
        done, state = progress.copies[0] if progress.copies else (0, None)
        if progress.before and loader._random is None and loader._dataset_kind == _DatasetKind.Map:
            restore_copy(loader.dataset, state)  # of before the draws that follow, which it may tell or set
            state = None
        super().__init__(loader)
        progress.base_seed = int(self._base_seed)
        if self._dataset_kind == _DatasetKind.Map:
            if progress.copies or loader._random is not None:
                # Draw the order now, before the dataset's state tells or sets that of the global generator.
                first = list(islice(self._sampler_iter, 1))
                self._sampler_iter = chain(first, self._sampler_iter)
            if progress.copies:
                restore_copy(self._dataset, state)
                progress.copies[0] = (done, where_copy(self._dataset))
            return
        if done or state is not None:
            fetching = Fetching(
                self._dataset, self._collate_fn, self._auto_collation, loader.batch_size, self._drop_last
            )
            self._dataset_fetcher = begun(fetching, done, state, self._dataset_fetcher)
        # Not as the dataset says, which may still tell where its last pass ended.
        elif keeps_state(self._dataset_fetcher.dataset_iter):
            progress.copies[0] = (0, where(self._dataset_fetcher))

    def _note(self, came: Any) -> None:
        self._progress.deliver()
        if self._progress.copies:
            iterable = self._dataset_kind == _DatasetKind.Iterable
            state = where(self._dataset_fetcher) if iterable else where_copy(self._dataset)
            self._progress.deliver_of(0, state)
