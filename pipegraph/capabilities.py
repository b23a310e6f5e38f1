"""What an operator or source can do for the engine's fast paths, beyond its contract; no operator needs any of it.

A capability is a class that an operator also derives from: ``class Filter(Operator, BundleMap)``. The plan asks once,
``operator.can(BundleMap)``, and then the engine calls the worker's own copy. An object that cannot do what its class
can names that in ``lacks``: ``self.lacks = (BundleMap,)``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk
from pipegraph.columns import Columns
from pipegraph.components import Drawn, DrawnRows
from pipegraph.contracts import Operator, Source

# -- several samples in one call ---------------------------------------------------------------------------


class BundleMap(ABC):
    """A map or filter that does several consecutive samples in one call; see ``pipegraph.bundle``."""

    @abstractmethod
    def work_into(self, made: list[Any], bundle: Bundle, start: int) -> None:
        """Append the results for the samples from ``start`` on, one by one; the first failure is raised.

        It does what ``process`` does with each, and keeps their identity; for a dropped sample it appends
        ``pipegraph.bundle.DROPPED``.
        """

    def columns(self, bundle: Bundle) -> Columns | None:
        """The results for all samples as columns, as the next ``Batch`` would pack them; None where that is impossible,
        as for samples with keys of their own. Then, or if it fails, they are made one by one.
        """
        return None


class BundleSource(ABC):
    """A random-access source that reads several samples in one call."""

    def indices_of(self, positions: Sequence[Any], epoch: int) -> Sequence[Any]:
        """The indices to give :meth:`read_into` for some positions."""
        return positions

    @abstractmethod
    def read_into(self, found: list[Any], indices: Sequence[Any], start: int) -> None:
        """Append the items of ``indices[start:]`` one by one; the first failure is raised."""

    def columns(self, indices: Sequence[Any]) -> Columns | None:
        """The items of some indices as columns; see :meth:`BundleMap.columns`."""
        return None


class BundleItems(ABC):
    """A source read in sequence that can leave the positions to :meth:`Source.positions_of`."""

    @abstractmethod
    def items(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[Any]:
        """As ``iterate`` without the positions."""


class Grouped:
    """A random-access source that is asked for several positions at a time."""

    group: int
    """Positions to ask for at a time."""


class Sampled:
    """A source in which a sampler draws the index of each position. ``positions`` then yields :class:`Drawn` values,
    and ``read``, ``indices_of`` and ``index_of`` get these, for the source does not keep them."""

    def draw_into(self, drawn: DrawnRows, positions: Iterator[Drawn], rows: int) -> None:
        """Append up to ``rows`` of what ``positions`` yields; what was drawn before an error stays."""
        drawn.extend(islice(positions, rows))


class BundleRegroup(ABC):
    """A regrouping operator that takes several samples in one call."""

    @abstractmethod
    def group_size(self, world_size: int = 1) -> int:
        """Samples in one group."""

    @abstractmethod
    def take_bundle(self, bundle: Bundle) -> Sequence[Chunk]:
        """As ``process`` for each sample of the bundle, at most :meth:`missing`."""

    def missing(self) -> int:
        """The maximum number of samples to give it next: those missing from the open group."""
        return self.group_size()

    def packing(self) -> Callable[[list[Any]], Any] | None:
        """A function that packs samples in the thread that makes them; :meth:`take_bundle` accepts its result.

        The function is thread-safe. It returns an object with ``part(start, stop)``, ``rows()`` and ``buffers()``, or
        None for samples that it cannot pack.
        """
        return None


# -- what a source knows of its data -----------------------------------------------------------------------


class UserData(ABC):
    """A source over data that it can describe."""

    def sees(self) -> str:
        """What it reads, in words that are equal on all ranks that read the same data; empty where ranks may differ."""
        return ""

    def deals_by(self) -> str:
        """The order by which the graph's seed deals its samples to the ranks, in words; empty if the seed does not."""
        return ""

    def deals_with(self, seed: int) -> None:  # noqa: B027
        """Deal by this seed, where ``length`` is asked before ``open`` was called."""

    def origin(self) -> str:
        """What ``config`` depends on besides the graph's text, for the error about a difference."""
        return ""

    def reads_once(self) -> Any:
        """The iterator that it reads, which no other source must read; None for what can be read again."""
        return None

    @abstractmethod
    def has_length(self) -> bool:
        """Whether ``length`` is known without running. Must not touch data: the plan calls it."""


class Resumable(ABC):
    """A source whose iterator has a state of its own, or whose sampler draws from generators of its own."""

    def snapshot(self) -> Any:
        """JSON from which :meth:`restore` can continue at the current item; None if ``iterate`` can only start over."""
        return None

    def between(self) -> Any:
        """JSON for ``restore(0, ...)``, of the pass to come: called while none reads the source. None if there is
        none, as for an iterator: each epoch begins one anew."""
        return None

    @abstractmethod
    def restore(self, step: int, snapshot: Any) -> None:
        """Called right before an ``iterate`` that may resume from ``snapshot``, taken before the item of ``step``.

        That of step 0 is of the beginning of the epoch, and for any step of it.

        A run may end before it reads: ``begin_run`` must then forget the snapshot.
        """


class Interchangeable:
    """Operators of one graph with the same ``sent_as`` are the same in another process: one is sent."""

    sent_as: str


# -- a say in the plan -------------------------------------------------------------------------------------


class Planned:
    """An operator that depends on its place in the graph."""

    def bind(self, upstream: Sequence[Operator | Source]) -> Operator:
        """The operator to run below these: this one, or a variant of it. Raises GraphError if it cannot run there."""
        assert isinstance(self, Operator)
        return self

    def bypass(self) -> str | None:
        """The reason why the plan can leave this operator out here; None if it has work to do."""
        return None

    def notes(self) -> list[str]:
        """Lines about it for the printed plan."""
        return []


class LaysImages:
    """An operator of whose images the plan knows how they lie.

    Attributes:
        image_layout: ``"NHWC"``, ``"NCHW"`` or ``"channels_last"``; None where it knows nothing.
    """

    image_layout: str | None = None


class CarriesImages(LaysImages, Planned):
    """One whose images lie as those that it is given."""

    def bind(self, upstream: Sequence[Operator | Source]) -> Operator:
        assert isinstance(self, Operator)
        above = upstream[0].can(LaysImages)
        if above is None or above.image_layout is None:
            return self
        bound = copy.copy(self)
        bound.image_layout = above.image_layout
        return bound


def notes_of(operator: Operator | Source) -> list[str]:
    """The lines of an operator for the printed plan."""
    planned = operator.can(Planned)
    return [] if planned is None else planned.notes()


class Fuses:
    """An operator that can do another one's work in the same go."""

    def take_in(self, below: Operator) -> Operator | None:
        """One operator that does this one's work and then ``below``'s; None if they cannot be fused."""
        return None

    def take_in_reading(self, reader: Operator | Source, name: str) -> Operator | None:
        """One operator that does the work of ``reader`` (stage ``name``) on each row of a batch of its inputs, then
        this one's; None if they cannot be fused."""
        return None


class Repeats(ABC):
    """An operator for which the source above each input is read several times in an epoch."""

    @abstractmethod
    def repeated(self, source: Source) -> Source:
        """The source to read in place of the one above an input."""

    def endless(self) -> Operator:
        """The operator to run where a stage below ends the epoch (``Fact.ENDS``): this one, or a variant of it."""
        assert isinstance(self, Operator)
        return self


class Moves:
    """An operator that moves chunks to other memory, or copies its input from any kind of memory.

    Attributes:
        moves: where it moves its chunks, if it does nothing else: ``"pinned"`` memory or a ``"device"``. The plan
            leaves it out if they are there already, or if the stage that reads them ``fetches``.
        fetches: whether it copies its input from any kind of memory, and waits for ``chunk.ready`` itself.
    """

    moves: Literal["", "pinned", "device"] = ""
    fetches: bool = False

    def pinned_for(self) -> Any:
        """The device for which it gains from input in pinned memory; None if it does not."""
        return None


class ReadsStorage:
    """An operator whose waits count as storage waits."""

    def holds(self, memory_limit: int) -> int:
        """Bytes of the loader's limit that it may hold itself; they are subtracted from the limit for chunks."""
        return 0


class UserFunctions(ABC):
    """An operator or source that calls functions of the user's."""

    @abstractmethod
    def functions(self) -> Sequence[Callable[..., Any]]:
        """These functions; a ``Cache`` below recomputes its values when their code changes."""


def functions_of(operator: Operator | Source) -> Sequence[Callable[..., Any]]:
    """The user's functions that an operator or source calls."""
    calls = operator.can(UserFunctions)
    return () if calls is None else calls.functions()


class LengthByRanks(ABC):
    """A regrouping operator whose length depends on the number of ranks."""

    @abstractmethod
    def length_for(self, n: int, world_size: int) -> int | None:
        """As ``length``, on each of these ranks."""


class Keyed(ABC):
    """A regrouping operator that puts samples with the same key next to each other."""

    @abstractmethod
    def group_of(self, sample: Any) -> Any:
        """The key of a sample."""


# -- kinds of maps that have loops of their own --------------------------------------------------------------


class RowOperator(Operator):
    """A one-to-one operator that works, and fails, sample by sample, even on batches.

    One worker begins a batch, all workers of the stage do its rows in parallel, and the worker that did the last row
    ends it. For a chunk of a single sample only ``process`` is called.
    """

    @abstractmethod
    def begin_batch(self, chunk: Chunk) -> Any:
        """Returns what ``do_row`` needs, such as the memory for all rows."""

    @abstractmethod
    def do_row(self, batch: Any, index: int) -> None:
        """Do row ``index``."""

    @abstractmethod
    def end_batch(self, batch: Any, kept: Sequence[int]) -> Chunk:
        """The finished batch; ``kept`` are the rows that succeeded, in order, at least one."""


class Memo(Operator):
    """A cache of what the stages above made from a sample: on a hit the source skips these stages and sends a
    ``pipegraph.engine.stage.cache_wiring.Hit``. Between it and a random-access source are only one-to-one stages
    that depend on their item alone."""

    @abstractmethod
    def attach(self, index_of: Callable[[int, int], Any]) -> None:
        """Called before ``open``: ``index_of(position, epoch)`` gives an index."""

    @abstractmethod
    def lookup(self, index: Any) -> Any:
        """A ``Hit`` for the source's sample ``index``, or None; called by the source's workers, after ``open``."""
