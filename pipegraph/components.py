"""Base classes of operators and sources, and the context with which workers open them."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import index as as_int
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, final

from pipegraph.errors import StateError
from pipegraph.stopping import Stopping

if TYPE_CHECKING:
    from pipegraph.contracts import Operator


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Traits:
    """Given by an operator as ``traits``, a class attribute or a property. Reading it touches no data and no device.

    What the engine calls while it runs are methods of the operator, named here beside the trait that says that it has
    them. What the plan asks is the value of a trait, or the method itself.

    Attributes:
        in_trainer: it works on devices, files or memory of the training process, so it cannot be opened in another one.
        seeds_itself: it has no user code that draws from torch's global generator, or selects the sample's generator by
            itself; else the engine does so before each call.
        trusted: it calls no code of the user's for positions, its groups leave in order, and its cursors are tuples.
        functions: the user's functions that it calls; a state names them, and tells where their code has changed.
        notes: lines about it for the printed plan.
        blocks: it does several rows in one call. A map has ``work_into(made, block, start)``, a source ``indices_of``
            and ``read_into`` (or ``items``), a regrouping operator ``take_bundle``, ``missing``, ``group_size`` and
            ``packing``.
        columns: a map or source that has ``columns(block)``: all rows as the next ``Batch`` would pack them.
        encoded: a map or source that has ``encoded(block)``: all rows in one object that makes them when it is asked
            to, as ``EncodedRows``, for a next stage in processes, or one that ``unpacks`` it; None where it cannot.
        unpacks: a map that takes rows ``encoded`` by the stage above it.
        group: positions that a random-access source is asked for at a time.
        light: a source that hands out what lies in memory, without code of the user's: the stage below reads it in its
            own threads.
        one_worker: a map that must have a single worker.
        most_threads: workers with which threads are as fast as processes; None for any number. A stage that has more of
            them, and whose backend is left to the plan, runs in processes.
        needs_order: a resumed run must give it the samples in the same order, so it may not follow a stage with
            ``ordered=False``.
        caches: on a hit the source skips the stages above, and sends what it has; see ``ops.Cache``.
        independent: it is no one-to-one map, and still a sample's result never depends on its neighbours.
        out_of_step: ranks that received equally many of its chunks may have consumed different numbers of samples.
        stacks: its batches hold exactly the given samples, each field a column.
        slabs: it writes batches into slabs, in the kind of memory named by ``Context.memory``.
        moves: where it moves its chunks, if it does nothing else: to ``"pinned"`` memory, a ``"device"``, or
            ``"slices"`` to several, from any kind of memory, with its own waits for ``chunk.ready``; or ``"made"``: it
            makes them on a device.
        pinned_for: the device for which it gains from input in pinned memory.
        holds: an operator whose waits count as storage waits: of the loader's memory limit, the bytes that it may hold.
        bind: the operator to run below these: this one, or a variant. Raises GraphError if
            it cannot run there.
        needless: the reason why the plan can leave it out; None if it has work to do.
        take_in: one operator that does this one's work and then that of the one below; None if there is none.
        take_in_reading: one operator that does the work of the reader (a stage's name) on each row of a batch of its
            inputs, then this one's; None if there is none.
        length_for: as ``length``, on each of so many ranks.
        key: the key of a sample, if it puts samples with the same key next to each other.
        pairs: a fan-in that combines the items at the same position of all inputs.
        separate: a fan-in, the rest of whose inputs can be redistributed to another number of ranks independently.
        one_world_size: a source that cannot resume an epoch of which a part was consumed at another world size.
        splits_itself: a source whose items the user's own code may split by the process's rank: no other rank can
            continue its part.
        in_memory: a source whose items are all available: none depends on what the consumer does with earlier ones.
        inherits: a source that can also be read by forks of the trainer, which share what it shares with them.
        waits: a source whose ``positions`` may block until the next one is available: each is handed over as it comes.
        sampled: a source in which a sampler draws the index of each position: ``positions`` yields ``Drawn`` values,
            which ``read``, ``indices_of`` and ``index_of`` get.
        resumable: a source with ``restore(step, snapshot)``. Its iterator has a ``snapshot()`` (JSON, of the current
            item; None: it can only start over), or with random access its sampler has ``between()``, of the pass to
            come. ``restore`` is called right before the ``iterate`` or ``positions`` that may resume from it; a run
            may end before it reads, and ``begin_run`` must then forget it.
        sent_as: operators of one graph with the same name here are the same in another process: one is sent.
        sees: what a source reads, in words that are equal on all ranks that read the same data; "" where they may
            differ.
        deals_by: the order by which the graph's seed deals its samples to the ranks, in words; "" if it does not.
        deals_with: deal by this seed, where ``length`` is asked before ``open`` was called.
        origin: what ``config`` depends on besides the graph's text, for the error about a difference.
        reads_once: the iterator that it reads, which no other source must read.
        has_length: whether ``length`` is known, without touching data; by default the plan asks for it.
    """

    in_trainer: bool = False
    seeds_itself: bool = False
    trusted: bool = False
    functions: tuple[Callable[..., Any], ...] = ()
    notes: Callable[[], Sequence[str]] = tuple
    blocks: bool = False
    columns: bool = False
    encoded: bool = False
    unpacks: bool = False
    group: int = 1
    light: bool = False
    one_worker: bool = False
    most_threads: int | None = None
    needs_order: bool = False
    caches: bool = False
    independent: bool = False
    out_of_step: bool = False
    stacks: bool = False
    slabs: bool = False
    moves: Literal["", "pinned", "device", "slices", "made"] = ""
    pinned_for: Callable[[], Any] = lambda: None
    holds: Callable[[int], int] | None = None
    bind: Callable[[Sequence[Operator | Source]], Operator] | None = None
    needless: Callable[[], str | None] = lambda: None
    take_in: Callable[[Operator], Operator | None] = lambda below: None
    take_in_reading: Callable[[Operator | Source, str], Operator | None] = lambda reader, name: None
    length_for: Callable[[int, int], int | None] | None = None
    key: Callable[[Any], Any] | None = None
    pairs: bool = False
    separate: bool = False
    one_world_size: bool = False
    splits_itself: bool = False
    in_memory: bool = False
    inherits: bool = False
    waits: bool = False
    sampled: bool = False
    resumable: bool = False
    sent_as: str = ""
    sees: Callable[[], str] = str
    deals_by: Callable[[], str] = str
    deals_with: Callable[[int], None] = lambda seed: None
    origin: Callable[[], str] = str
    reads_once: Any = None
    has_length: Callable[[], bool] | None = None


History = tuple[tuple[int, Any], ...]
"""``(world size, steps per rank)`` for each world size at which a part of the epoch was consumed. If the ranks consumed
different numbers of steps, the second value is a sequence with one entry per rank, as ``pipegraph.order`` takes it."""

Kind = str
"""The name of a kind, one of those in ``engine.kinds``."""


@dataclass(eq=False, repr=False)
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
    """Base class of operators and sources: a node of a graph, opened and closed by each worker.

    Attributes:
        name: the base of its default stage name.
        traits: what it is and can beyond its contract, in place of what its base class says.
    """

    kind: ClassVar[Kind]

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def traits(self) -> Traits:
        return Traits()

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
        return map(Drawn, self.positions, self.indices)

    def extend(self, drawn: Iterable[Drawn]) -> None:
        """Append these; if ``drawn`` raises, the ones before stay."""
        for position, index in drawn:
            self.positions.append(as_int(position))
            self.indices.append(index)

    def draw(self, sampled: Iterator[Drawn], rows: int) -> None:
        """Append up to ``rows`` of what ``sampled`` yields; what was drawn before an error stays."""
        if isinstance(sampled, SampledIndices):
            sampled.draw_into(self, rows)
        else:
            self.extend(islice(sampled, rows))


class SampledIndices(Iterator[Drawn]):
    """What a sampler gives, with its positions.

    Args:
        again: called before the sampler: other stages may have worked in this thread since.
    """

    def __init__(self, indices: Iterator[Any], positions: Iterator[int], again: Callable[[], object]) -> None:
        self._indices = indices
        self._positions = positions
        self._again = again

    def __next__(self) -> Drawn:
        self._again()
        index = next(self._indices)
        return Drawn(next(self._positions), index)

    def draw_into(self, drawn: DrawnRows, rows: int) -> None:
        """As many calls of ``next``, at a tenth of their cost."""
        self._again()
        try:
            drawn.indices.extend(islice(self._indices, rows))
        finally:
            drawn.positions.extend(islice(self._positions, len(drawn.indices) - len(drawn.positions)))


class Source(Component):
    """A source of samples.

    A source numbers the items of one rank's epoch 0, 1, 2 ...: its *steps*. ``iterate`` yields
    ``(global position, item)`` from step ``start`` on. A random-access source gives ``positions``
    and ``read`` instead, and all workers of its stage read it.
    """

    kind: ClassVar[Kind] = "source"
    gives: str = "sample"
    random_access: bool = False
    reads_ahead: bool = False
    """Whether an epoch may be read before its pass begins. False where users decide what is read (a sampler, an
    iterable): the training loop may change it until then."""
    index_of: Callable[[Any, int], Any] | None = None
    """``index_of(position, epoch)``: the index in the data of the sample at a position, whatever the order: an int or a
    str. A ``Cache`` below needs it. Positions with the same index, of any epochs, have the same sample."""

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        """Number of this rank's items in ``epoch``; None if it is not known without running."""
        return None

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[tuple[int, Any]]:
        """``(position, item)`` from step ``start`` on; called by the stage's first worker."""
        for place in self.positions(epoch, rank, world_size, start):
            yield place.position if isinstance(place, Drawn) else place, self.read(place, epoch)

    @property
    @final
    def resizable(self) -> bool:
        """Whether it can resume an epoch of which a part was consumed at another world size."""
        own = type(self).begin_run is not Source.begin_run
        return own and not self.traits.one_world_size

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

    def read(self, position: Any, epoch: int) -> Any:
        """The item at a global position of an epoch (random-access sources); thread-safe."""
        raise NotImplementedError(f"{type(self).__name__} is not random-access")

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        """The global positions of some steps, in this run (``begin_run``).

        By default those that ``positions`` yields; of a source that is not random-access, rank r of W has
        r, r+W, r+2W ... A source that cannot tell them from the steps returns none: below a stage with
        ``ordered=False`` a state then names every sample of the epoch that was delivered.
        """
        if self.random_access:
            yielded = self.positions(epoch, rank, world_size, steps.start)
            return [as_int(position) for position in islice(yielded, len(steps))]  # type: ignore[arg-type]
        return [step * world_size + rank for step in steps]


def history_of(history: History, source: str) -> History:
    """The part of a history that concerns one source."""
    return tuple(
        (ranks, counts.get(source, counts) if isinstance(counts, Mapping) else counts)
        for ranks, counts in history
    )
