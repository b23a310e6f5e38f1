"""Base classes of operators and sources, and the context with which workers open them."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from itertools import islice
from operator import index as as_int
from typing import Any, ClassVar, NamedTuple, TypeVar, final

from pipegraph.errors import StateError
from pipegraph.stopping import Stopping

History = tuple[tuple[int, Any], ...]
"""``(world size, steps per rank)`` for each world size at which a part of the epoch was consumed. If the ranks consumed
different numbers of steps, the second value is a sequence with one entry per rank, as ``pipegraph.order`` takes it."""

Kind = str
"""The name of a kind, one of ``engine.kinds.KINDS``."""


@dataclass(eq=False)
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


class Fact(Flag):
    """What an operator or source says of itself to the plan beyond its contract: ``facts = Fact.IN_TRAINER``, or
    several with ``|``. The plan and the engine ask ``Fact.IN_TRAINER in operator.facts``."""

    IN_TRAINER = auto()
    """It works on devices, files or memory of the training process, so it cannot be opened in another one."""
    SEEDS_ITSELF = auto()
    """It has no user code that draws from torch's global generator, or selects the sample's generator by itself; else
    the engine does so before each call."""
    TRUSTED = auto()
    """Its resumes are exact by its own tests, so ``pg.testing`` need not check it. It calls no code of the user's for
    positions, its groups leave in order, and its cursors are tuples."""

    ONE_WORKER = auto()
    """A map that must have a single worker."""
    NEEDS_ORDER = auto()
    """A resumed run must give it the samples in the same order, so it may not follow a stage with ordered=False."""
    INDEPENDENT = auto()
    """It is no one-to-one map, and still a sample's result never depends on its neighbours: plain (un)batching."""
    OUT_OF_STEP = auto()
    """Ranks that received equally many of its chunks may have consumed different numbers of samples."""
    SLABS = auto()
    """It writes batches into slabs, in the kind of memory named by ``Context.memory``."""
    COLUMNS = auto()
    """Its batches hold exactly the given samples, each field a column."""
    PAIRS = auto()
    """A fan-in that combines the items at the same position of all inputs."""
    SEPARATE = auto()
    """A fan-in, the rest of whose inputs can be redistributed to another number of ranks independently."""
    ENDS = auto()
    """A fan-in of one input that ends an epoch after a number of items, however many its input has."""

    ONE_WORLD_SIZE = auto()
    """A source that cannot resume an epoch of which a part was consumed at another world size."""
    SPLITS_ITSELF = auto()
    """A source whose items the user's own code may split by the process's rank: no other rank can continue its part."""
    IN_MEMORY = auto()
    """A source whose items are all available: none depends on what the consumer does with earlier ones."""
    INHERITS = auto()
    """A source that can also be read by forks of the trainer, which share what it shares with them."""
    WAITS = auto()
    """A source whose ``positions`` may block until the next one is available: each is handed over as it comes."""


Capability = TypeVar("Capability")


class Component(ABC):
    """Base class of operators and sources: a node of a graph, opened and closed by each worker.

    Attributes:
        name: the base of its default stage name.
        facts: what it says of itself beyond its contract, and beside what its base classes say.
        lacks: capabilities of its class (``pipegraph.capabilities``) that this object does not have.
    """

    kind: ClassVar[Kind]
    facts: Fact = Fact(0)
    lacks: tuple[type, ...] = ()

    def __init_subclass__(cls) -> None:
        for base in cls.__bases__:
            cls.facts |= getattr(base, "facts", Fact(0))

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @final
    def can(self, capability: type[Capability]) -> Capability | None:
        """This object as a capability (see ``pipegraph.capabilities``), None if it lacks it."""
        return self if isinstance(self, capability) and capability not in self.lacks else None

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
        return own and Fact.ONE_WORLD_SIZE not in self.facts

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
        r, r+W, r+2W ... A source that cannot tell them from the steps returns none: they are then noted while it is
        read.
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
