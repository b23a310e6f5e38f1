"""The interfaces of operators and sources. Everything the engine knows of them stands here.

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
``merge``   a chunk or None; from ``input``                 ``next_input()``, ``end_input(i)``
``route``   the chunk; ``choose(chunk)`` names the output  ``outputs``
=========== ============================================== =====================================

What these declare makes plan, length, elasticity and digest decidable without running. What an operator can do is
declared here, or it cannot: nothing follows from a name, or from a method that somebody may have for another reason.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal

from pipegraph.bundle import Bundle
from pipegraph.chunk import Chunk, Cursor, Lineage
from pipegraph.components import (
    Component as Component,
    Context as Context,
    Drawn as Drawn,
    DrawnRows as DrawnRows,
    History as History,
    Kind as Kind,
    Source as Source,
    history_of as history_of,
)

STATE_METHODS = ("state_dict", "load_state_dict")


class Operator(Component):
    """What a stage does with chunks; subclass it, name its ``kind``, define ``process``.

    Attributes:
        needs: its input: ``"sample"``, ``"batch"``, ``"batches"`` (lists of them), ``"part"``, several as
            ``"sample|part"``, or ``"any"``.
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
        needs_order: whether a resume must meet its samples in the same order; it may then not stand below a stage with
            ``ordered=False``.
        repeats: whether the source above each input is read several times in an epoch; see :meth:`repeated`.
        moves: where it moves its chunks, if it does nothing else: ``"pinned"`` memory or a ``"device"``. The plan
            leaves it out where they lie there already, or where the stage that reads them ``fetches``.
        fetches: whether it copies its input from wherever that lies, and waits for ``chunk.ready`` itself.
        reads: whether it brings data in from storage, so that its waits are storage's.
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
    needs_order: bool = False
    repeats: bool = False
    slabs: bool = False
    collects: bool = False
    in_step: bool = True
    moves: Literal["", "pinned", "device"] = ""
    fetches: bool = False
    reads: bool = False

    @property
    def stateful(self) -> bool:
        """Whether it resumes from what it has gathered from the chunks before: it then runs in order with one worker.

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

        For maps with ``bundles``. It does what ``process`` does with each, and keeps their identity; in place of one
        that is dropped goes ``pipegraph.bundle.DROPPED``. It iterates over ``bundle.data``, which may end early so that
        what is finished can leave; it is then called again for the rest.
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

    def repeated(self, source: Source) -> Source:
        """What the source above an input becomes (of operators with ``repeats``)."""
        raise NotImplementedError(f"{type(self).__name__} does not repeat its inputs")

    def take_in(self, below: Operator) -> Operator | None:
        """The operator that does this one's work and then ``below``'s in one go; None where they stay apart."""
        return None

    def take_in_reading(self, reader: Operator | Source, name: str) -> Operator | None:
        """The operator that does the work of ``reader``, stage ``name``, on each row of a batch of what that was to
        read, then this one's; None where they stay apart."""
        return None

    def read_away(self, source: Source) -> Source | None:
        """What gives the items that this one makes of ``source``'s, read by workers elsewhere; None where these cannot
        read them."""
        return None

    def reads_pinned(self) -> bool:
        """Whether it gains from input in pinned memory."""
        return False

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
        """Prepare to resume at ``cursor`` (made by this operator's own chunks); returns the cursor
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
    ``pipegraph.engine.stage.cache_wiring.Hit``. It follows a random-access source by one-to-one stages without
    randomness."""

    @abstractmethod
    def attach(self, index_of: Callable[[int, int], Any], digest: str) -> None:
        """Called before ``open`` with the index of a position in an epoch, and what the stages above are."""

    @abstractmethod
    def lookup(self, index: Any) -> Any:
        """A ``Hit`` for the source's sample ``index``, or None; called by the source's workers, after ``open``."""


class Regroup(Operator):
    """Chunks in, other chunks out: one worker, in order.

    Without a state of its own its groups are of consecutive whole chunks, as ``Chunk.group`` makes them: a restart
    resumes behind the last one, with nothing held. One that carries a remainder over, interleaves groups or leaves
    samples out keeps what it holds, chunks too, in its ``state_dict()``.

    One whose chunks do not carry the lineages of the samples that are in them says in ``spent``, after each call, which
    samples it no longer holds; the engine takes them off.

    An operator whose ``process`` or ``flush`` raises sets ``failing`` to the chunks that this is about and that
    it has released; by default it is about the chunk given.
    """

    kind: ClassVar[Kind] = "regroup"
    failing: Sequence[Chunk] = ()
    spent: list[Lineage] | None = None
    group_of: Callable[[Any], Any] | None = None
    """Of samples that leave in groups, what tells a sample's group from its neighbours'."""
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

    def missing(self) -> int:
        """How many samples to give it next, at most: those that are missing from the open group."""
        return self.group_size()

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


class FanIn(Operator):
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
        """Prepare to resume at ``cursor``; returns the cursor of each input. None is the start."""
        return [None] * inputs

    @abstractmethod
    def cursor(self, positions: Sequence[Cursor]) -> Cursor:
        """The cursor of the output when input i stands at ``positions[i]``."""


class FanOut(Operator):
    """One input, several outputs; each chunk goes to one of them."""

    kind: ClassVar[Kind] = "route"
    shareable = False

    @abstractmethod
    def choose(self, chunk: Chunk) -> int:
        """The output, 0 .. outputs-1, that gets this chunk."""
