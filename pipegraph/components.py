"""Base classes of operators and sources, and the context with which workers open them."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import index as as_int
from typing import Any, ClassVar, Literal, NamedTuple

from pipegraph.errors import StateError
from pipegraph.fingerprints import HandedOut
from pipegraph.stopping import Stopping

History = tuple[tuple[int, Any], ...]
"""``(world size, steps per rank)`` for each world size at which a part of the epoch was consumed. If the ranks consumed
different numbers of steps, the second value is a sequence with one entry per rank, as ``pipegraph.order`` takes it."""

Kind = Literal["source", "sidecar", "map", "expand", "regroup", "merge", "route"]


@dataclass
class Context:
    """The context with which a worker opens its copy of an operator.

    Attributes:
        stage: the stage's name.
        seed: the graph's seed.
        rank, world_size: of this process.
        worker: 0 .. workers-1.
        stopping: set when the pipeline stops; long waits should wait on it too, or use its ``ending``.
        count: ``count(name, n)`` adds to a counter of the stage.
        read_by_stages: whether another stage reads this one's output, and not only the loader (or a ``Scatter``).
        memory: the kind of memory for the stage's slabs, as the plan names it: ``"pageable"``, ``"pinned"``,
            ``"staged"`` or ``"delivered"``.
        share: ``share(name, make)`` returns one object for all workers of the stage; the first call makes it.
        memory_limit: of the loader, in bytes; 0 if none is set.
        device: the accelerator for which memory is pinned: that of the copies that read it, else the trainer's own.
        allocate: allocates slabs in place of the allocator for ``memory``: shared memory, in a worker's process.
    """

    stage: str
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    worker: int = 0
    stopping: Stopping = field(default_factory=Stopping)
    count: Callable[[str, int], None] = lambda name, n: None
    share: Callable[[str, Callable[[], Any]], Any] = lambda name, make: make()
    read_by_stages: bool = True
    memory: str = "pageable"
    memory_limit: int = 0
    device: Any = None
    allocate: Callable[[int], Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled graph describes the same stages; the objects of a run are left out.
        return Context, (self.stage, self.seed, self.rank, self.world_size, self.worker)


class Component(ABC):
    """Base class of operators and sources: a node's part in a graph, opened and closed by each worker."""

    kind: ClassVar[Kind]
    default_name: ClassVar[str | None] = None
    portable: bool = True
    """Whether it may be opened in another process; False if its output exists only in this one."""
    sent_as: str = ""
    """Operators of one graph with the same non-empty name here are interchangeable in another process: one is sent."""
    own_numbers: bool = False
    """Whether it selects the sample's generator for user code that draws from torch's global generator by itself, or
    has no such code; if False the engine does so before each call."""
    bundles: bool = False
    """Whether it can process several consecutive samples in one call; see ``pipegraph.bundle``."""

    def open(self, context: Context) -> None:  # noqa: B027
        """Called once by each worker, on its own copy, in its own thread, before the first item."""

    def close(self) -> None:  # noqa: B027
        """Called once by each worker when the loader closes."""

    def cancel(self) -> None:  # noqa: B027
        """Called from another thread when the pipeline stops: make a ``process`` that waits return, now or later."""

    def uncancel(self) -> None:  # noqa: B027
        """Called between runs, while no worker is in ``process``: it may wait again."""

    def config(self) -> dict[str, Any]:
        """JSON of the parameters that change what is delivered; part of the graph's digest.

        By default: the attributes with plain values, as they were when the operator was added to the graph (numbers,
        texts, functions, and lists, tuples and dicts of these).
        """
        return {}

    def functions(self) -> Sequence[Callable[..., Any]]:
        """The user's functions in it; a ``Cache`` below recomputes its values when their code changes."""
        return ()

    def origin(self) -> str:
        """What ``config`` depends on besides the graph's text, for the error about a difference; usually nothing."""
        return ""

    @property
    def name(self) -> str:
        """The base of this node's default stage name."""
        return self.default_name or type(self).__name__.lower()


class Drawn(NamedTuple):
    """The index that a sampler drew for a position."""

    position: int
    index: Any


class DrawnRows(Sequence[Drawn]):
    """What a sampler drew for several positions, as two lists: a thousand tuples would cost as much as small rows."""

    __slots__ = ("indices", "positions")

    def __init__(self, positions: list[int], indices: list[Any]) -> None:
        self.positions = positions
        self.indices = indices

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return DrawnRows(self.positions[at], self.indices[at])
        return Drawn(self.positions[at], self.indices[at])

    def __iter__(self) -> Iterator[Drawn]:
        return iter(list(map(Drawn, self.positions, self.indices)))  # a list iterator: a stage may end it

    def extend(self, drawn: Iterable[Drawn]) -> None:
        """Append these; if ``drawn`` raises, the ones before stay."""
        for position, index in drawn:
            self.positions.append(as_int(position))
            self.indices.append(index)


class Source(Component):
    """A source of samples.

    A source numbers the items of one rank's epoch 0, 1, 2 ...: its *steps*. ``iterate`` yields
    ``(global position, item)`` from step ``start`` on. A random-access source gives ``positions``
    and ``read`` instead, and all workers of its stage read it.
    """

    kind: ClassVar[Kind] = "source"
    random_access: bool = False
    group: int = 1
    """Positions per call of ``read_many``; 1 if larger calls gain nothing."""
    elastic: bool = True
    draws: bool = False
    """Whether a sampler draws the index of each position. ``positions`` then yields :class:`Drawn` values, and
    ``read``, ``read_many``, ``indices_of`` and ``index_of`` get these in place of positions, for the source does not
    keep them."""
    never_waits: bool = False
    """Whether its items are all available: none depends on what the consumer does with earlier ones."""
    reads_ahead: bool = False
    """Whether an epoch may be read before its pass begins. False where users decide what is read (a sampler, an
    iterable): the training loop may change it until then."""
    handed_out: HandedOut | None = None
    """Notes of values that lie in the memory of the user's data; None if it copies them."""
    level: str = "sample"
    begins_at_start: bool = False
    """Whether its :meth:`iterate` and :meth:`positions` are known to begin at their ``start``, and its :meth:`length`
    to be right, so that the engine need not check it."""
    index_of: Callable[[Any, int], Any] | None = None
    """``index_of(position, epoch)``: the index in the data of the sample at a position, whatever the order: an int or a
    str. A ``Cache`` below needs it. Positions with the same index, of any epochs, have the same sample."""
    waits: bool = False
    """Whether its ``positions`` may block until the next one is available, so that each is handed over as it comes."""

    def sees(self) -> str:
        """What it reads, in words that are equal on all ranks that read the same data; empty where ranks may differ."""
        return ""

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        """Number of this rank's items in ``epoch``; None if it is not known without running."""
        return None

    def given(self) -> tuple[Any, Any]:
        """The data that the user gave, and what decides its order: the training loop may change both between epochs."""
        return None, None

    def changed_in_place(self) -> bool:
        """Whether stages have changed the user's data since a pass began; False where that is not known."""
        return self.handed_out is not None and self.handed_out.changed(self.given()[0])

    def has_length(self) -> bool:
        """Whether :meth:`length` is known without running. Must not touch data: the plan calls it."""
        return self.length(0, 0, 1) is not None

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[tuple[int, Any]]:
        """``(position, item)`` from step ``start`` on; called by the stage's first worker."""
        for place in self.positions(epoch, rank, world_size, start):
            yield place.position if isinstance(place, Drawn) else place, self.read(place, epoch)

    def items(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[Any] | None:
        """As :meth:`iterate` without the positions, if these equal :meth:`positions_of` the steps; else None."""
        return None

    @property
    def resizable(self) -> bool:
        """Whether it can resume an epoch of which a part was consumed at another world size."""
        return self.elastic and type(self).begin_run is not Source.begin_run

    def snapshot(self) -> Any:
        """JSON from which :meth:`restore` can continue at the current item; None if ``iterate`` can only start over.

        For a random-access source, called between epochs: the state that the next ``positions`` needs at any step.
        """
        return None

    def restore(self, step: int, snapshot: Any) -> None:
        """Called right before an ``iterate`` that may resume from ``snapshot``, taken before the item of ``step``.

        A run may end before it reads: :meth:`begin_run` must then forget the snapshot.
        """

    def begin_run(self, epoch: int, history: History) -> None:
        """A run begins at ``epoch``, of which ``history`` was consumed at other world sizes; steps count from its end.

        :meth:`length` then returns what is left of that epoch.

        Raises:
            StateError: this source cannot resume at another world size (the default, unless overridden).
        """
        if history:
            raise StateError(
                f"{self.name} cannot resume at another world size; resume with {history[-1][0]} ranks"
            )

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[int | Drawn]:
        """The global positions of this rank's steps from ``start`` on, increasing (random-access sources)."""
        raise NotImplementedError(f"{type(self).__name__} is not random-access")

    def draw_into(self, drawn: list[Any] | DrawnRows, positions: Iterator[Any], rows: int) -> None:
        """Append up to ``rows`` of what :meth:`positions` yields; what was drawn before an error stays.

        A source may override it with a faster way than one by one.

        Args:
            drawn: a list of positions; ``DrawnRows`` for a source that :attr:`draws`.
        """
        drawn.extend(islice(positions, rows))

    def read(self, position: Any, epoch: int) -> Any:
        """The item at a global position of an epoch (random-access sources); thread-safe."""
        raise NotImplementedError(f"{type(self).__name__} is not random-access")

    def read_many(self, positions: Sequence[Any], epoch: int) -> Sequence[Any]:
        """The items at several positions, for sources with a ``group`` above 1."""
        return [self.read(position, epoch) for position in positions]

    @property
    def reads_many(self) -> bool:
        """Whether it overrides :meth:`read_into`, for several samples in one call (random-access sources)."""
        return type(self).read_into is not Source.read_into

    def indices_of(self, positions: Sequence[Any], epoch: int) -> Sequence[Any]:
        """The indices to give :meth:`read_into` for some positions (random-access sources with ``bundles``)."""
        return positions

    def read_into(self, found: list[Any], indices: Sequence[Any], start: int) -> None:
        """Append the items of ``indices[start:]`` one by one; the first failure is raised.

        Iterating over ``indices`` may end early, for finished items to be sent; it is then called again for the rest.
        """
        raise NotImplementedError(f"{type(self).__name__} is not read in bundles")

    def gather(self, indices: Sequence[Any]) -> Any:
        """The items of some indices, packed as the next ``Batch`` would (see ``Regroup.packing``), in one call.

        None if that is impossible, as for samples with their own keys; then, or if it fails, they are read one by one.
        """
        return None

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        """The global positions of some steps, in this run (``begin_run``).

        By default those that ``positions`` yields; of a source that is not random-access, or that :attr:`draws`, rank r
        of W has r, r+W, r+2W ...
        """
        if self.random_access and not self.draws:
            yielded = self.positions(epoch, rank, world_size, steps.start)
            return [as_int(position) for position in islice(yielded, len(steps))]  # type: ignore[arg-type]
        return [step * world_size + rank for step in steps]

    def substitute(self, position: int, epoch: int, attempt: int) -> int | None:
        """A nearby position whose sample may replace the one at ``position``: a keyed draw per ``attempt``."""
        return None


def history_of(history: History, source: str) -> History:
    """The part of a history that concerns one source."""
    return tuple(
        (ranks, counts[source] if isinstance(counts, Mapping) else counts) for ranks, counts in history
    )
