"""What operators and sources have in common."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import index as as_int
from typing import Any, ClassVar, Literal, NamedTuple

from pipegraph.errors import StateError
from pipegraph.stopping import Stopping

History = tuple[tuple[int, Any], ...]
"""``(world size, steps per rank)`` consumed of an epoch at each world size that it has had; where ranks have consumed
differently, the second is a sequence with an entry for each, as ``pipegraph.order`` takes it."""

Kind = Literal["source", "map", "expand", "regroup", "merge", "route"]


@dataclass
class Context:
    """What a worker's copy of an operator may know of where it runs.

    Attributes:
        stage: the stage's name.
        seed: the graph's seed.
        rank, world_size: this process's place.
        worker: 0 .. workers-1.
        stopping: set when the pipeline stops; long waits should wait on it too, or use its ``ending``.
        count: adds to a named counter of the stage.
        read_by_stages: whether another stage reads this one's output, and not only the loader (or a ``Scatter``).
        memory: what the stage's slabs lie in: ``"pageable"``; ``"pinned"`` or ``"staged"`` where a copy reads them.
        share: ``share(name, make)`` is one object for all workers of the stage, made by the first that asks.
        memory_limit: of the loader, in bytes; 0 where nobody has set one.
        allocate: what slabs are made by where it is not for ``memory`` to say: in a worker's process they are shared.
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
    allocate: Callable[[int], Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled graph describes the same stages; what belongs to a run stays behind.
        return Context, (self.stage, self.seed, self.rank, self.world_size, self.worker)


class Component(ABC):
    """What operators and sources share: they sit in a graph, are opened, and are closed."""

    kind: ClassVar[Kind]
    default_name: ClassVar[str | None] = None
    portable: bool = True
    """Whether it may be opened in another process; not where it hands on what only this one has."""
    sent_as: str = ""
    """Operators of one graph with the same name here, which is not empty, differ in nothing that their work in another
    process depends on: they are sent there as one."""
    own_numbers: bool = False
    """Whether it says itself whose random numbers its user's functions draw from torch's global generator, or has no
    such functions; else the engine does, before each call."""
    bundles: bool = False
    """Whether it can be asked for several consecutive samples at once; see ``pipegraph.bundle``."""

    def open(self, context: Context) -> None:  # noqa: B027
        """Called once by each worker, on its own copy, in its own thread, before the first item."""

    def close(self) -> None:  # noqa: B027
        """Called once by each worker when the loader closes."""

    def cancel(self) -> None:  # noqa: B027
        """Called from another thread when the pipeline stops: end a ``process`` that waits, now or later."""

    def uncancel(self) -> None:  # noqa: B027
        """Called between runs, when no worker is inside: ``process`` may wait again."""

    def config(self) -> dict[str, Any]:
        """JSON of the parameters that change what is delivered; part of the graph's digest.

        Where this is not defined, the plain values among the attributes stand for them, as they were when the operator
        was placed in the graph: numbers, texts, functions, and lists, tuples and dicts of these.
        """
        return {}

    def functions(self) -> Sequence[Callable[..., Any]]:
        """The user's functions in it; a ``Cache`` below makes its values anew when their code changes."""
        return ()

    def origin(self) -> str:
        """What besides the graph's text has decided ``config``, for the error that says it differs; often nothing."""
        return ""

    @property
    def name(self) -> str:
        """The stem of this node's default stage name."""
        return self.default_name or type(self).__name__.lower()


class Drawn(NamedTuple):
    """What a sampler has drawn for a position."""

    position: int
    index: Any


class DrawnRows(Sequence[Drawn]):
    """What a sampler has drawn for several positions: two lists, for a thousand tuples take as long as small rows."""

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
        return iter(list(map(Drawn, self.positions, self.indices)))  # a list's: a stage may end it early

    def extend(self, drawn: Iterable[Drawn]) -> None:
        """Append these; what came before an error stays."""
        for position, index in drawn:
            self.positions.append(as_int(position))
            self.indices.append(index)


class Source(Component):
    """Where samples come from.

    A source numbers the items of one rank's epoch 0, 1, 2 ...: its *steps*. ``iterate`` yields
    ``(global position, item)`` from step ``start`` on. A random-access source gives ``positions``
    and ``read`` instead, and is then read by all its stage's workers.
    """

    kind: ClassVar[Kind] = "source"
    random_access: bool = False
    group: int = 1
    """Positions that ``read_many`` reads in one call; 1 where there is nothing to gain."""
    elastic: bool = True
    draws: bool = False
    """Whether what lies at a position is known only once it is drawn. ``positions`` then gives a :class:`Drawn` each,
    and ``read``, ``read_many``, ``indices_of`` and ``index_of`` get these in place of positions: nobody keeps them."""
    never_waits: bool = False
    """Whether its items are there already: none may be waiting for what the consumer does with those before."""
    level: str = "sample"
    waits: bool = False
    """Whether its ``positions`` may block until the next one is there, so that each is handed over as it comes."""

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        """This rank's items in ``epoch``; None where it is not known without running."""
        return None

    def has_length(self) -> bool:
        """Whether :meth:`length` is known without running; the plan asks this, which must touch no data."""
        return self.length(0, 0, 1) is not None

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[tuple[int, Any]]:
        """``(position, item)`` from step ``start`` on; called by the stage's first worker."""
        for place in self.positions(epoch, rank, world_size, start):
            yield place.position if isinstance(place, Drawn) else place, self.read(place, epoch)

    def items(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[Any] | None:
        """As :meth:`iterate` without the positions, where these are :meth:`positions_of` the steps; else None."""
        return None

    @property
    def resizable(self) -> bool:
        """Whether it can continue when a part of an epoch was consumed at another world size."""
        return self.elastic and type(self).begin_run is not Source.begin_run

    def snapshot(self) -> Any:
        """JSON from which :meth:`restore` can continue where ``iterate`` stands; None if that can only start anew.

        Of a random-access source, between epochs: what the next ``positions`` begins with, at any step of the epoch.
        """
        return None

    def restore(self, step: int, snapshot: Any) -> None:
        """The ``iterate`` that is called at once may resume from ``snapshot``, taken before the item of ``step``.

        What a run that ends before it reads leaves behind is to be forgotten in :meth:`begin_run`.
        """

    def begin_run(self, epoch: int, history: History) -> None:
        """A run begins at ``epoch``, of which ``history`` was consumed at other world sizes; steps count from there.

        :meth:`length` is then what is left of that epoch.

        Raises:
            StateError: this source cannot resume at another world size, as one that does not override this.
        """
        if history:
            raise StateError(
                f"{self.name} cannot resume at another world size; resume with {history[-1][0]} ranks"
            )

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[int | Drawn]:
        """The global positions of this rank's steps from ``start`` on, growing (random-access sources)."""
        raise NotImplementedError(f"{type(self).__name__} is not random-access")

    def draw_into(self, drawn: list[Any] | DrawnRows, positions: Iterator[Any], rows: int) -> None:
        """Append up to so many of what :meth:`positions` gives; what was drawn before an error stays.

        By another way where drawing one by one costs more.

        Args:
            drawn: a list of positions; ``DrawnRows`` where :attr:`draws`.
        """
        drawn.extend(islice(positions, rows))

    def read(self, position: Any, epoch: int) -> Any:
        """The item at a global position of an epoch (random-access sources); any worker calls it."""
        raise NotImplementedError(f"{type(self).__name__} is not random-access")

    def read_many(self, positions: Sequence[Any], epoch: int) -> Sequence[Any]:
        """The items at several positions, for sources with a ``group`` above 1."""
        return [self.read(position, epoch) for position in positions]

    @property
    def reads_many(self) -> bool:
        """Whether it has a :meth:`read_into` of its own, for several samples in one call (random-access sources)."""
        return type(self).read_into is not Source.read_into

    def indices_of(self, positions: Sequence[Any], epoch: int) -> Sequence[Any]:
        """What :meth:`read_into` needs to know of some positions (random-access sources with ``bundles``)."""
        return positions

    def read_into(self, found: list[Any], indices: Sequence[Any], start: int) -> None:
        """Append the items of ``indices[start:]`` one by one; one that fails ends it with its error.

        Iterated, ``indices`` may end before the last so that what is finished can leave; it is then called again.
        """
        raise NotImplementedError(f"{type(self).__name__} is not read in bundles")

    def gather(self, indices: Sequence[Any]) -> Any:
        """The items of some indices put together as the ``Batch`` behind would (see ``Regroup.packing``), in one go.

        None where that cannot be done, as with samples that have keys of their own; then, and where it fails, they are
        read one by one.
        """
        return None

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        """The global positions of some steps: by default dealt out in turn, r, r+W, r+2W ..."""
        return [step * world_size + rank for step in steps]

    def index_of(self, position: Any, epoch: int) -> Any:
        """What stays the same of a sample when the order changes: its number in the data (for ``Cache``)."""
        return position

    def substitute(self, position: int, epoch: int, attempt: int) -> int | None:
        """A nearby position whose sample ``Replace`` may put at ``position``: a keyed draw, try by try."""
        return None


def history_of(history: History, source: str) -> History:
    """What one source needs to know of a history."""
    return tuple(
        (ranks, counts[source] if isinstance(counts, Mapping) else counts) for ranks, counts in history
    )
