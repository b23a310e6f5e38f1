"""``pg.DataLoader``: drop-in replacement for torch's. Its arguments, and which passes it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import numpy as np
import torch.utils.data
from torch.utils.data import IterDataPipe, MapDataPipe, _DatasetKind

from pipegraph.engine.process import zygote
from pipegraph.errors import NotPicklableError
from pipegraph.graph import Graph
from pipegraph.loader.torch_dataloader.in_accelerate import builds_another
from pipegraph.loader.torch_dataloader.index_feed import DrawnIndices
from pipegraph.loader.torch_dataloader.pass_iterators import Inherited, Inline, Pipeline, Pipelined
from pipegraph.loader.torch_dataloader.resumable import ResumableDataLoader

_T_co = TypeVar("_T_co", covariant=True)


class DataLoader(ResumableDataLoader[_T_co]):
    """Torch's ``DataLoader`` on pipegraph's workers: its arguments, its batches in its order, and a state.

    For the same generator the batches equal torch's, with what the samples draw from the global generators of torch,
    NumPy and Python in a worker's process. A pass can be stopped anywhere and resumed: see :meth:`state_dict`.

    Args:
        workers: what ``num_workers`` counts: ``"process"``, as in torch, each with its own copy of the data set; or
            ``"thread"``, which start at once and copy nothing: for what releases the interpreter lock. Torch's random
            functions then give each sample its own numbers. An iterable is read by one thread. There is no
            ``get_worker_info`` and no ``worker_init_fn``.

    All other arguments are torch's. ``multiprocessing_context`` is checked and kept (``"thread"`` is
    ``workers="thread"``, for trainers that build a loader from another's attributes); worker processes are forked from
    a process without threads, whatever it says. What cannot be pickled, and an iterable with
    ``in_order=False``, goes to torch's own workers.

    Raises:
        ValueError: as torch's for its arguments; ``workers`` is another, or ``worker_init_fn`` or ``timeout`` is given
            with threads.
        TypeError: ``generator`` is no ``torch.Generator``.

    >>> loader = DataLoader(range(5), batch_size=2)
    >>> [batch.tolist() for batch in loader]
    [[0, 1], [2, 3], [4]]
    """

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

    def _get_iterator(self) -> Any:
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            return super()._get_iterator()
        if self.num_workers == 0:
            return Inline(self)
        self.check_worker_number_rationality()
        if not self._inherits:
            restored, stands = self._restored, self._base_state()
            try:
                begun = Pipelined(self)
                if self.workers == "process":
                    zygote.keep_for(self)  # for the passes to come
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
        """Call ``set_epoch`` of the samplers and the data set, where they have one, as trainers do before each pass."""
        those: tuple[Any, ...] = (self.sampler, self.batch_sampler, self.dataset)
        for each in those:
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    # -- the pipeline --------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The pipeline behind the loader, as a description to build on: ``loader.graph["batches"].then(...)``.

        Its own ``loader()`` draws from the sampler in its workers, raises a sample's error and ends with it, and has
        the state of every graph.
        """
        pipeline = Pipeline(self, self.dataset, 0, carries=False)
        return pipeline.graph(DrawnIndices(self._index_sampler, pipeline.shares), pin=None)


def _plain(number: Any) -> Any:
    """One of NumPy's integers as an int, which torch asks for."""
    return int(number) if isinstance(number, np.integer) else number
