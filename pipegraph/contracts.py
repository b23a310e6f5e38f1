"""What an operator and a source are. Everything the engine knows of them stands here.

An operator is described once, in the graph, and *opened* by each worker on its own shallow copy:
``open(context)``, then ``process`` for every chunk, then ``close``. User functions inside it are
shared by all copies. ``kind`` says how the engine treats what ``process`` returns:

=========== ============================================== =====================================
kind        ``process(chunk)`` returns                     also
=========== ============================================== =====================================
``map``     a chunk; with ``one_to_one = False`` or None
``expand``  an iterable of chunks, made by ``chunk.child`` ``flush`` is never called
            or ``chunk.row``
``regroup`` an iterable of chunks, made by ``Chunk.group`` ``flush()`` once at each epoch's end
``merge``   a chunk or None; ``input`` tells which         ``next_input()``, ``end_input(i)``
``route``   the chunk; ``choose(chunk)`` names the output  ``outputs``
=========== ============================================== =====================================

What these declare makes plan, length, elasticity and digest decidable without running. What an operator can do is
declared here, or it cannot: nothing follows from a name, or from a method that somebody may have for another reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Cursor
from pipegraph.errors import StateError
from pipegraph.stopping import Stopping

STATE_METHODS = ("state_dict", "load_state_dict")

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

    @property
    def goes_on(self) -> bool:
        """Whether it can go on when a part of an epoch was consumed at another world size."""
        return self.elastic and type(self).go_on is not Source.go_on

    def snapshot(self) -> Any:
        """JSON from which :meth:`restore` can go on where ``iterate`` stands; None if that can only start anew."""
        return None

    def restore(self, step: int, snapshot: Any) -> None:
        """The ``iterate`` that is called at once may go on from ``snapshot``, taken when the item of ``step`` was next.

        What a run that ends before it reads leaves behind is to be forgotten in :meth:`go_on`.
        """

    def go_on(self, epoch: int, history: History) -> None:
        """A run begins at ``epoch``, of which ``history`` was consumed at other world sizes; steps count from there.

        :meth:`length` is then what is left of that epoch.

        Raises:
            StateError: this source cannot go on at another world size, as one that does not override this.
        """
        if history:
            raise StateError(
                f"{self.name} cannot go on at another world size; resume with {history[-1][0]} ranks"
            )

    def positions(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[int | Drawn]:
        """The global positions of this rank's steps from ``start`` on, growing (random-access sources)."""
        raise NotImplementedError(f"{type(self).__name__} is not random-access")

    def read(self, position: Any, epoch: int) -> Any:
        """The item at a global position of an epoch (random-access sources); any worker calls it."""
        raise NotImplementedError(f"{type(self).__name__} is not random-access")

    def read_many(self, positions: Sequence[Any], epoch: int) -> Sequence[Any]:
        """The items at several positions, for sources with a ``group`` above 1."""
        return [self.read(position, epoch) for position in positions]

    def indices_of(self, positions: Sequence[Any], epoch: int) -> Sequence[Any]:
        """What :meth:`read_into` needs to know of some positions (random-access sources with ``bundles``)."""
        return positions

    def read_into(self, found: list[Any], indices: Sequence[Any], start: int) -> None:
        """Append the items of ``indices[start:]`` one by one; one that fails ends it with its error."""
        raise NotImplementedError(f"{type(self).__name__} is not read in bundles")

    def positions_of(self, steps: range, epoch: int, rank: int, world_size: int) -> Iterable[int]:
        """The global positions of some steps: by default dealt out in turn, r, r+W, r+2W ..."""
        return [step * world_size + rank for step in steps]

    def index_of(self, position: Any, epoch: int) -> Any:
        """What stays the same of a sample when the order changes: its number in the data (for ``Cache``)."""
        return position

    def substitute(self, position: int, epoch: int, attempt: int) -> int | None:
        """A position near by whose sample ``Replace`` may put at ``position``: a keyed draw, try by try."""
        return None


class Operator(Component):
    """What a stage does with chunks; subclass it, name its ``kind``, define ``process``.

    Attributes:
        needs: its input: ``"sample"``, ``"batch"``, ``"part"``, several as ``"sample|part"``, or ``"any"``.
        gives: what its output is: ``"sample"``, ``"batch"`` or ``"same"``.
        inputs: how many upstream nodes: 1, or ``"many"``.
        outputs: how many downstream streams a route has.
        one_to_one: a map that never drops.
        random: whether it draws random numbers (a ``Cache`` below it would freeze them).
        per_sample: whether, on a batch, it works (and fails) sample by sample.
        slabs: whether it writes batches into slabs, in the memory that ``Context.memory`` says.
        collects: whether its batches are the given samples and no more, each field a column.
        in_step: whether ranks that have received as many chunks of it have consumed as many samples.
        shareable: False for an operator that must have a single worker.
        moves: where it moves its chunks, if it does nothing else: ``"pinned"`` memory or a ``"device"``. The plan
            leaves it out where they lie there already, or where whoever reads them ``fetches``.
        fetches: whether it copies its input from wherever that lies, and waits for ``chunk.ready`` itself.
    """

    kind: ClassVar[Kind] = "map"
    needs: str = "any"
    gives: str = "same"
    inputs: int | Literal["many"] = 1
    outputs: int = 1
    one_to_one: bool = True
    random: bool = False
    per_sample: bool = False
    shareable: bool = True
    slabs: bool = False
    collects: bool = False
    in_step: bool = True
    moves: Literal["", "pinned", "device"] = ""
    fetches: bool = False

    @property
    def stateful(self) -> bool:
        """Whether it goes on from what it has gathered from the chunks before: it then runs in order with one worker.

        An operator says so by defining ``state_dict()`` and ``load_state_dict(state)`` (JSON) in its own class, or
        with ``stateful = True``. With ``stateful = False`` such methods are there for something else. Where a base
        class that is no operator brings them, it must say which.
        """
        return all(issubclass(_definer(type(self), name), Operator) for name in STATE_METHODS)

    @property
    def elastic(self) -> bool:
        """Whether a sample comes out the same whatever is around it: one-to-one, or plain (un)batching."""
        return self.kind == "map" and self.one_to_one

    def work_into(self, made: list[Any], bundle: Bundle, start: int) -> None:
        """Append the data made of samples ``start`` on, one by one; one that fails ends it with its error.

        For maps with ``bundles``. It does what ``process`` does with each, and keeps their identity.
        """
        raise NotImplementedError(f"{type(self).__name__} does not take bundles")

    @abstractmethod
    def process(self, chunk: Chunk) -> Any:
        """See the table in the module docstring; called by one worker at a time on its copy."""

    def bind(self, upstream: Sequence[Operator | Source]) -> Operator:
        """The operator that does this one's work behind these: itself, or a variant of it."""
        return self

    def bypass(self) -> str | None:
        """Why this operator has nothing to do here, so that the plan leaves it out; else None."""
        return None

    def take_in(self, below: Operator) -> Operator | None:
        """The operator that does this one's work and then ``below``'s in one go; None where they stay apart."""
        return None

    def take_in_reading(self, reader: Operator | Source, name: str) -> Operator | None:
        """The operator that does the work of ``reader``, stage ``name``, on each row of a batch of what that was to
        read, then this one's; None where they stay apart."""
        return None

    def reads_pinned(self) -> bool:
        """Whether it gains from input in pinned memory."""
        return False

    def functions(self) -> Sequence[Callable[..., Any]]:
        """The user's functions in it; a ``Cache`` below makes its values anew when their code changes."""
        return ()

    def notes(self) -> list[str]:
        """What the printed plan should say about it."""
        return []

    def holds(self, memory_limit: int) -> int:
        """Bytes of the loader's limit that it may hold beside chunks; chunks then have that much less."""
        return 0

    def length(self, n: int) -> int | None:
        """Chunks out per epoch for ``n`` in; None where it depends on the data."""
        return n if self.kind in ("map", "route") and self.one_to_one else None

    def length_for(self, n: int, world_size: int) -> int | None:
        """As :meth:`length`, for operators to which the number of ranks matters."""
        return self.length(n)

    inputs_in: tuple[int, int | None] | None = None
    """Where in the cursors of a fan-in or a regrouping operator those of its inputs lie: from, to. None is for a cursor
    that is the input's as it is. Known, a state also holds where a graph was changed at this stage."""

    def begin_at(self, cursor: Cursor) -> Cursor:
        """A cursor with which :meth:`resume` begins anew where the input stands at ``cursor``, holding nothing."""
        return cursor

    def resume(self, cursor: Cursor) -> Cursor:
        """Prepare to go on at ``cursor`` (made by this operator's own chunks); returns the cursor
        at which the input must restart. Called before the first item of a restored epoch."""
        return cursor


def _definer(kind: type, name: str) -> type:
    """The class in which a method is written; ``object`` if there is none."""
    return next((each for each in kind.__mro__ if name in vars(each)), object)


class RowOperator(Operator):
    """A one-to-one operator that works, and fails, sample by sample, also on batches.

    A batch is begun once, its rows are done by any of the stage's workers at once, and it is ended by the one
    that did the last. Only ``process`` is called for a chunk that is a single sample.
    """

    per_sample = True

    @abstractmethod
    def begin_batch(self, chunk: Chunk) -> Any:
        """Whatever the rows need, such as the memory for all of them."""

    @abstractmethod
    def do_row(self, batch: Any, index: int, sample: Any) -> None:
        """Do row ``index``; on ``sample`` instead of the batch's own where that is not None."""

    @abstractmethod
    def end_batch(self, batch: Any, kept: Sequence[int]) -> Chunk:
        """The outcome; ``kept`` are the rows that were done, in order, at least one."""


class Memo(Operator):
    """Knows what the stages above made of a sample before: the source then skips these, and their items come as
    ``pipegraph.stage.caching.Hit``. It follows a random-access source by one-to-one stages without randomness."""

    @abstractmethod
    def attach(self, index_of: Callable[[int, int], Any], digest: str) -> None:
        """Told before ``open``: the index of a position in an epoch, and what the stages above are."""

    @abstractmethod
    def lookup(self, index: Any) -> Any:
        """A ``Hit`` for the source's sample ``index``, or None; called by the source's workers, after ``open``."""


class Regroup(Operator):
    """Chunks in, other chunks out: one worker, in order.

    Without a state of its own its groups are of consecutive whole chunks, as ``Chunk.group`` makes them: a restart
    goes on behind the last one, with nothing held. One that carries a remainder over, interleaves groups or leaves
    samples out keeps what it holds, chunks too, in its ``state_dict()``.

    An operator whose ``process`` or ``flush`` raises sets ``failing`` to the chunks that this is about and that
    it has let go of; by default it is about the chunk given.
    """

    kind: ClassVar[Kind] = "regroup"
    failing: Sequence[Chunk] = ()
    consecutive: bool = False
    """Whether its groups are known to be of consecutive whole chunks, so that nothing need watch over them."""
    one_to_one = False
    shareable = False

    def begin(self) -> None:
        """A run begins (also after one that was broken off): forget what is held."""

    def emits_next(self) -> bool:
        """Whether the next ``process`` may make something new, for which memory is then reserved."""
        return True

    def group_size(self, world_size: int = 1) -> int:
        """Samples in one group (of operators with ``bundles``)."""
        raise NotImplementedError(f"{type(self).__name__} does not take bundles")

    def packing(self) -> Callable[[list[Any]], Any] | None:
        """What puts samples together where they are made, in any thread; :meth:`take_bundle` takes that as well.

        It returns an object with ``part(start, stop)``, ``rows()`` and ``buffers()``, or None for samples that it
        cannot put together.
        """
        return None

    def fills(self, rows: int) -> bool:
        """Whether so many more samples make a group, for which memory is then reserved."""
        return True

    def take_bundle(self, bundle: Bundle) -> Sequence[Chunk]:
        """As ``process`` with each of its samples (of operators with ``bundles``)."""
        raise NotImplementedError(f"{type(self).__name__} does not take bundles")

    def handed_on(self, cursor: Cursor, more: int, draw: tuple[Any, ...]) -> tuple[Cursor, str, int] | None:
        """What of its input had left when a rank stood at a cursor of its output: all up to a cursor of the input; some
        steps behind that (see ``pipegraph.order.left.Taken``), and so many samples behind both. None where that is not
        known.

        Args:
            more: samples of its output behind ``cursor`` that have left too.
            draw: (seed, epoch, stage).
        """
        return None if more and not self.consecutive else (cursor, "", more)

    def flush(self) -> Iterable[Chunk]:
        """What is left at the end of an epoch; the next chunk begins a new epoch."""
        return ()


class Merge(Operator):
    """Several inputs, one output, read in an order that only the operator's state decides."""

    kind: ClassVar[Kind] = "merge"
    inputs: int | Literal["many"] = "many"
    one_to_one = False
    shareable = False
    follows_route: bool = False
    separate: bool = False
    """Whether what is left of each input can be dealt to another number of ranks by itself."""
    pairs: bool = False
    """Whether it puts together what comes at the same place of each input."""

    def begin(self, inputs: int, epoch: int) -> None:
        """A new epoch over ``inputs`` upstream nodes begins."""

    def check_inputs(self, count: int) -> None:
        """Raises GraphError if this many inputs do not fit."""

    def follow(self, route: str, outputs: tuple[int, ...]) -> None:
        """Input i is output ``outputs[i]`` of ``route`` (for operators with ``follows_route``)."""

    @abstractmethod
    def next_input(self) -> int | None:
        """Which input the next chunk is taken from; None when this epoch is over."""

    @abstractmethod
    def end_input(self, index: int) -> None:
        """Input ``index`` has no more chunks in this epoch."""

    def turn(self, mark: Any) -> bool:
        """Take a ``Mark`` of a ``Route``; False if it is not for this operator."""
        return False

    def merged_length(self, lengths: Sequence[int]) -> int | None:
        """Chunks out per epoch for the given chunks in."""
        return None

    def cursors(self, cursor: Cursor, inputs: int) -> list[Cursor]:
        """Prepare to go on at ``cursor``; returns the cursor of each input. None is the start."""
        return [None] * inputs

    @abstractmethod
    def cursor(self, positions: Sequence[Cursor]) -> Cursor:
        """The cursor of the output when input i stands at ``positions[i]``."""


class Route(Operator):
    """One input, several outputs; each chunk goes to one of them."""

    kind: ClassVar[Kind] = "route"
    shareable = False

    @abstractmethod
    def choose(self, chunk: Chunk) -> int:
        """The output, 0 .. outputs-1, that gets this chunk."""


class Clock(ABC):
    """Time, so that tests can hold it."""

    @abstractmethod
    def now_ns(self) -> int:
        """Nanoseconds that only grow."""


def history_of(history: History, source: str) -> History:
    """What one source needs to know of a history."""
    return tuple(
        (ranks, counts[source] if isinstance(counts, Mapping) else counts) for ranks, counts in history
    )
