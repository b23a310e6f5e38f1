"""``pg.DataLoader``: drop-in replacement for torch's. Its arguments, its state, and which passes it begins."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, Literal, TypeVar

import numpy as np
import torch.utils.data
from torch.utils.data import IterDataPipe, MapDataPipe, RandomSampler, SequentialSampler, _DatasetKind

from pipegraph.errors import NotPicklableError, PipegraphWarning, StateError
from pipegraph.loader.options import resolve
from pipegraph.loader.torch_dataloader.batch_progress import (
    BatchProgress,
    random_state,
    replicas_of,
    restore_random_state,
    tensor_of,
    text_of,
)
from pipegraph.loader.torch_dataloader.fetching import where_copy
from pipegraph.loader.torch_dataloader.inline_pass import Inline
from pipegraph.nested_samplers import keeps_state, nested_samplers, seed_of

_T_co = TypeVar("_T_co", covariant=True)


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """Torch's ``DataLoader`` on pipegraph's workers: its arguments, its batches in its order, and a state.

    For the same generator the batches equal torch's. This includes random numbers that samples take in a worker process
    from the global generators of torch, NumPy and Python. You can stop anywhere in a pass and resume: see
    :meth:`state_dict`.

    Args:
        workers: what ``num_workers`` counts. ``"process"``: worker processes, as in torch, each with its own copy of
            the dataset. ``"thread"``: threads, which start at once and need no copy; for datasets that release the
            GIL. In threads, torch's random functions are seeded per sample, one thread reads an iterable, and there is
            no ``get_worker_info`` and no ``worker_init_fn``.

    All other arguments are torch's. ``multiprocessing_context`` is checked and kept, but worker processes are always
    forked from a process without threads. (``"thread"`` means ``workers="thread"``, for trainers that build a loader
    from another's attributes.) A dataset that cannot be pickled, and an iterable with ``in_order=False``, uses torch's
    own workers.

    Raises:
        ValueError: as in torch; or ``workers`` is neither of the two, or ``worker_init_fn`` or ``timeout`` is given
            with threads.
        TypeError: ``generator`` is not a ``torch.Generator``.

    Examples:
        >>> loader = DataLoader(range(5), batch_size=2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """

    _progress: BatchProgress  # of the pass that began last
    _restored: BatchProgress | None = None  # with which the next one begins
    _random: torch.Tensor | None = None  # that passes draw from in place of torch's global generator

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        workers: Literal["process", "thread"] = "process",
    ) -> None:
        if multiprocessing_context == "thread":
            workers, multiprocessing_context = "thread", None
        if workers not in ("process", "thread"):
            raise ValueError(
                f"workers option should be 'process' or 'thread', got {workers!r}; see num_workers"
            )
        if workers == "thread" and (worker_init_fn is not None or timeout):
            raise ValueError("worker_init_fn and timeout options need workers='process'")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(
                "generator option should be a torch.Generator, such as torch.Generator().manual_seed(3), got "
                f"{generator!r}"
            )
        batch_size, num_workers, prefetch_factor = map(_plain, (batch_size, num_workers, prefetch_factor))
        if (
            num_workers
            and prefetch_factor is not None
            and not (type(prefetch_factor) is int and prefetch_factor)
        ):
            raise ValueError(
                f"prefetch_factor option should be an int of at least 1, got {prefetch_factor!r}"
            )
        self.workers = workers
        self._inherits = False
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        # Torch's workers deliver an iterable's batches as they come; the pipeline takes them in turn.
        self._inherits = not in_order and workers == "process" and self._dataset_kind == _DatasetKind.Iterable
        self._progress = self._fresh()

    # -- passes --------------------------------------------------------------------------------

    def __iter__(self) -> Any:
        with self._own_random():
            return super().__iter__()

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """Passes begin within this."""
        if self._random is None:
            yield
            return
        now = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            yield
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(now)

    def _next_progress(self) -> BatchProgress:
        """Of the pass that begins: what was restored, or a new one."""
        fresh, found, self._restored = self._fresh(), self._restored, None
        if found is None:
            found = fresh
        elif not found.begun:
            found.options = fresh.options  # the dataset may have grown since the state was loaded
        self._progress.superseded = False
        self._progress = found
        return found

    def _begin_anew(self, iterator: Any) -> None:
        """With what was restored, an iterator that has delivered nothing."""
        with self._own_random():
            iterator.__init__(self)
        if self.persistent_workers:
            self._iterator = iterator

    def _fresh(self) -> BatchProgress:
        sampler = self._index_sampler
        shuffle = {RandomSampler: True, SequentialSampler: False}.get(
            type(getattr(sampler, "sampler", sampler))
        )
        options = {"batch_size": getattr(sampler, "batch_size", None), "shuffle": shuffle}
        options["num_replicas"] = replicas_of(sampler)
        options["sampler.seed"] = seed_of(sampler)
        # A stream may split itself among the ranks, each of which has its place.
        options["ranks"] = resolve(None, None)[1] if self._dataset_kind == _DatasetKind.Iterable else None
        shuffled = shuffle or options["num_replicas"] is not None  # else what was added is simply read too
        # What the sampler shuffles, which need not be the dataset.
        data: list[Any] = [
            getattr(each, "data_source", getattr(each, "dataset", None)) for each in nested_samplers(sampler)
        ]
        options["samples"] = next((len(each) for each in data if shuffled and hasattr(each, "__len__")), None)
        if self._dataset_kind == _DatasetKind.Map and not self._copies_have_states:
            return BatchProgress(options)
        copies = 1 if self.workers == "thread" else max(1, self.num_workers)
        return BatchProgress(options, copies=[[0, None] for _ in range(copies)])

    @property
    def _same_on_all_ranks(self) -> bool:
        """Whether a rank's place is every rank's: a sampler splits the samples among them, by the epoch alone."""
        sampler, alone = self._index_sampler, self.generator is not None or self.workers == "thread"
        dealt = replicas_of(sampler) is not None and not alone and not self._copies_have_states
        return dealt and set(random_state(sampler)) == {"epoch"}

    @property
    def _copies_have_states(self) -> bool:
        """Whether each worker's copy of a map-style dataset has a state, and always reads the same."""
        in_turn = self.workers == "process" and self.in_order
        return keeps_state(self.dataset) and (self.num_workers == 0 or in_turn)

    def _get_iterator(self) -> Any:
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            return super()._get_iterator()
        if self.num_workers == 0:
            return Inline(self)
        from pipegraph.loader.torch_dataloader.pass_iterators import Inherited, Pipelined

        self.check_worker_number_rationality()
        if not self._inherits:
            from pipegraph.engine.process import zygote

            restored, stands = self._restored, self._base_state()
            processes = self.workers == "process"
            try:
                with zygote.renewed(self.num_workers) if processes else contextlib.nullcontext():
                    begun = Pipelined(self)
                if processes:
                    zygote.keep_for(self)  # for passes to come, by which the trainer may have threads
                return begun
            except NotPicklableError:
                # What can only be inherited (locks, queues, open files) goes where torch's workers find it: these are
                # forks of this process. The base seed is drawn again, from where it was drawn before.
                self._inherits, self._restored = True, restored
                self._put_base_state(stands)
        return Inherited(self)

    @property
    def multiprocessing_context(self) -> Any:
        """As torch's. Accelerate reads ``"thread"`` where there are threads: what it builds has them too."""
        if builds_another(DataLoader) and self.workers == "thread" and self.num_workers:
            return "thread"
        return super().multiprocessing_context

    @multiprocessing_context.setter
    def multiprocessing_context(self, given: Any) -> None:
        vars(torch.utils.data.DataLoader)["multiprocessing_context"].__set__(self, given)

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the samplers and the dataset if they have one, as trainers do before each pass."""
        those: tuple[Any, ...] = (self.sampler, self.batch_sampler, self.dataset)
        for each in those:
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, as a small dict with a fixed set of keys; thread-safe.

        A state taken inside the loop or after a ``break`` is for the rest of the epoch. One taken before or after the
        loop is for a whole epoch, and holds the random states that will generate its order. Inside the loop, it
        includes the state of the dataset in each worker, if the dataset has ``state_dict`` and ``load_state_dict``.
        Outside the loop it does not, so that no worker has to start, except that of a map-style dataset with
        ``num_workers=0``. It is JSON, unless a dataset's state is not.
        """
        return self._state()

    def _state(self, ended: bool = False) -> dict[str, Any]:
        """The state; ``ended``: as if the pass had run to its end."""
        rank, _ = resolve(None, None)
        if self._restored is not None:
            return self._restored.state(rank, self._same_on_all_ranks)
        progress = self._progress
        indexed = self._dataset_kind == _DatasetKind.Map
        begun = progress.base_seed is not None
        if ended or progress.finished or not begun:
            lasting = progress.base_seed if self._iterator is not None else None  # of persistent workers
            progress = self._fresh()
            progress.base_seed = lasting
            if indexed and self.num_workers == 0 and progress.copies:  # which is the dataset itself
                progress.copies = [[0, where_copy(self.dataset)]]
            progress.before = random_state(self._index_sampler) if indexed else {"none": ""}
            if self.generator is not None:
                progress.before["base"] = text_of(self.generator.get_state())
        elif indexed and not progress.order:  # it is drawn with the first batch
            progress = replace(progress, order=random_state(self._index_sampler))
        return progress.state(rank, self._same_on_all_ranks)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass delivers exactly what followed the state.

        A map-style dataset does not read the earlier samples again, and ``num_workers`` may change (unless the dataset
        has its own state). In each worker, an iterable's ``load_state_dict`` is called; an iterable without it is read
        again up to the position. A state of a whole epoch restores the generators that its order is generated from,
        including torch's global one. To get another order, seed them after this call.

        The loader's latest iterator begins there too if it has delivered nothing. One that has delivered batches goes
        on where it was, with a warning.

        Raises:
            StateError: the state is not from a ``DataLoader``; or it holds states of workers and ``num_workers``
                differs; or it is from the middle of an epoch and ``batch_size``, ``shuffle`` or, if it shuffles, the
                dataset's length differs.
        """
        loaded_by_accelerate(state)
        self._restored = restored = BatchProgress.of(state, self._fresh(), resolve(None, None)[0])
        self._iterator = None
        self._progress.superseded = True
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


def _plain(number: Any) -> Any:
    """One of NumPy's integers as an int, which torch asks for."""
    return int(number) if isinstance(number, np.integer) else number


# What Accelerate makes of one. ``prepare`` and ``skip_first_batches`` read the attributes of a loader and build another
# one, of the class that this module of Accelerate's names ``DataLoader``; it wraps that one, and keeps the state from
# before the batch that it fetches ahead. What would be lost there is said when it happens.
ACCELERATE = "accelerate.data_loader"


def _called_from(name: str) -> FrameType | None:
    """The frame of this function of Accelerate's, if that called the caller of the caller; its frames in between are
    comprehensions and attribute lookups."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__") == ACCELERATE:
        if frame.f_code.co_name == name:
            return frame
        frame = frame.f_back
    return None


def builds_another(kind: type) -> bool:
    """Whether it is Accelerate that reads an attribute of such a loader now; warns if it builds another kind."""
    building = _called_from("prepare_data_loader") or _called_from("skip_first_batches")
    if building is None:
        return False
    built = building.f_globals["DataLoader"]
    if building.f_locals.get("use_stateful_dataloader"):
        advice = (
            "leave out use_stateful_dataloader=True, with which it builds torchdata's: the prepared pg.DataLoader has "
            "a state of its own, which accelerator.register_for_checkpointing(loader) saves and loads"
        )
    elif not (isinstance(built, type) and issubclass(built, kind)):
        advice = "set accelerate.data_loader.DataLoader = pg.DataLoader before"
    else:
        return True
    warnings.warn(
        f"Accelerate builds another loader from this pg.DataLoader, without pipegraph's workers and state: {advice}",
        PipegraphWarning,
        stacklevel=3,
    )
    return True


def loaded_by_accelerate(state: dict[str, Any]) -> None:
    """Called where a state is loaded: Accelerate's wrapper has the same from now on, and not only from the first batch.

    Raises:
        StateError: rank 0 reads for all ranks there, and the wrapper's state counts batches that were not delivered.
    """
    loading = _called_from("load_state_dict")
    wrapper = None if loading is None else loading.f_locals.get("self")
    if wrapper is None:
        return
    ranks = getattr(getattr(wrapper, "state", None), "num_processes", 1)
    if type(wrapper).__name__ == "DataLoaderDispatcher" and ranks > 1:
        raise StateError(
            f"rank 0 reads this stream for {ranks} ranks, and Accelerate's state of it counts batches that were not "
            "delivered: give DataLoaderConfiguration(dispatch_batches=False), with which each rank reads it"
        )
    wrapper.dl_state_dict = state
