"""The interfaces of operators and sources: everything that the engine knows about them.

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

Plan, length, elasticity and digest follow from these declarations alone, without running anything. An operator can do
only what it declares here: nothing is inferred from a name, or from a method that may exist for another reason.
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
DEPENDENCES = ("item", "place", "epoch", "random")
"""The words of ``Operator.depends_on``."""


class Operator(Component):
    """What a stage does with chunks; subclass it, name its ``kind``, define ``process``.

    Attributes:
        needs: its input: ``"sample"``, ``"batch"``, ``"batches"`` (lists of batches), ``"part"``, several as
            ``"sample|part"``, or ``"any"``.
        gives: its output: ``"sample"``, ``"batch"`` or ``"same"``.
        inputs: number of upstream nodes: 1, or ``"many"``.
        outputs: number of downstream streams of a route.
        one_to_one: whether it is a map that never drops.
        depends_on: what its result depends on: ``"item"`` (what it is given, and its own parameters), and ``"place"``
            (in the stream), ``"epoch"`` and ``"random"`` (numbers that it draws) where it uses these, as
            ``"item|epoch"``. A ``Cache`` below is allowed only for ``"item"``; None: not declared.
        per_sample: whether, on a batch, it works (and fails) sample by sample.
        slabs: whether it writes batches into slabs, in the kind of memory named by ``Context.memory``.
        collects: whether its batches hold exactly the given samples, each field a column.
        in_step: whether ranks that received equally many of its chunks have consumed equally many samples.
        shareable: False for an operator that must have a single worker.
        needs_order: whether a resumed run must give it the samples in the same order; it is then not allowed below a
            stage with ``ordered=False``.
        repeats: whether the source above each input is read several times in an epoch; see :meth:`repeated`.
        moves: where it moves its chunks, if it does nothing else: ``"pinned"`` memory or a ``"device"``. The plan
            leaves it out if they are there already, or if the stage that reads them ``fetches``.
        fetches: whether it copies its input from any kind of memory, and waits for ``chunk.ready`` itself.
        reads: whether it reads from storage, so that its waits count as storage waits.
    """

    kind: ClassVar[Kind] = "map"
    needs: str = "any"
    gives: str = "same"
    inputs: int | Literal["many"] = 1
    outputs: int = 1
    one_to_one: bool = True
    depends_on: str | None = None
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
        """Whether it needs state gathered from earlier chunks to resume: it then runs in order with one worker.

        An operator says so by defining ``state_dict()`` and ``load_state_dict(state)`` (JSON) in its own class, or
        with ``stateful = True``. ``stateful = False`` says that such methods serve another purpose. An operator that
        inherits them from a class that is not an operator must set it either way.
        """
        return all(issubclass(_definer(type(self), name), Operator) for name in STATE_METHODS)

    @property
    def elastic(self) -> bool:
        """Whether a sample's result never depends on its neighbours: one-to-one stages and plain (un)batching."""
        return self.kind == "map" and self.one_to_one

    def work_into(self, made: list[Any], bundle: Bundle, start: int) -> None:
        """Append the results for the samples from ``start`` on, one by one; the first failure is raised.

        For maps with ``bundles``. It does what ``process`` does with each, and keeps their identity; for a dropped
        sample it appends ``pipegraph.bundle.DROPPED``. It iterates over ``bundle.data``, which may end early so that
        finished results can be sent; it is then called again for the rest.
        """
        raise NotImplementedError(f"{type(self).__name__} does not take bundles")

    @abstractmethod
    def process(self, chunk: Chunk) -> Any:
        """See the table in the module docstring; called by one worker at a time on its copy."""

    def bind(self, upstream: Sequence[Operator | Source]) -> Operator:
        """The operator to run below these: this one, or a variant of it."""
        return self

    def bypass(self) -> str | None:
        """The reason why the plan can leave this operator out here; None if it has work to do."""
        return None

    def repeated(self, source: Source) -> Source:
        """The source to read in place of the one above an input (for operators with ``repeats``)."""
        raise NotImplementedError(f"{type(self).__name__} does not repeat its inputs")

    def take_in(self, below: Operator) -> Operator | None:
        """One operator that does this one's work and then ``below``'s; None if they cannot be fused."""
        return None

    def take_in_reading(self, reader: Operator | Source, name: str) -> Operator | None:
        """One operator that does the work of ``reader`` (stage ``name``) on each row of a batch of its inputs, then
        this one's; None if they cannot be fused."""
        return None

    def read_away(self, source: Source) -> Source | None:
        """A source of this operator's outputs for ``source``, read by workers elsewhere; None if they cannot."""
        return None

    def pinned_for(self) -> Any:
        """The device for which it gains from input in pinned memory; None if it does not."""
        return None

    def notes(self) -> list[str]:
        """Lines about it for the printed plan."""
        return []

    def holds(self, memory_limit: int) -> int:
        """Bytes of the loader's limit that it may hold itself; they are subtracted from the limit for chunks."""
        return 0

    def length(self, n: int) -> int | None:
        """Chunks out per epoch for ``n`` in; None if it depends on the data."""
        return n if self.kind in ("map", "route") and self.one_to_one else None

    def length_for(self, n: int, world_size: int) -> int | None:
        """As :meth:`length`, for operators whose length depends on the number of ranks."""
        return self.length(n)

    inputs_in: tuple[int, int | None] | None = None
    """Slice ``(from, to)`` of the input cursors within a cursor of a fan-in or a regrouping operator. None: the cursor
    is the input's own. With a known slice a state can still be loaded after the graph was changed at this stage."""

    def begin_at(self, cursor: Cursor) -> Cursor:
        """A cursor from which :meth:`resume` starts empty, with the input at ``cursor``."""
        return cursor

    def resume(self, cursor: Cursor) -> Cursor:
        """Prepare to resume at ``cursor`` (of one of this operator's chunks); returns the cursor at which the input
        must restart. Called before the first item of a restored epoch."""
        return cursor


def _definer(kind: type, name: str) -> type:
    """The class that defines a method; ``object`` if none does."""
    return next((each for each in kind.__mro__ if name in vars(each)), object)


class RowOperator(Operator):
    """A one-to-one operator that works, and fails, sample by sample, even on batches.

    One worker begins a batch, all workers of the stage do its rows in parallel, and the worker that did the last row
    ends it. For a chunk of a single sample only ``process`` is called.
    """

    per_sample = True

    @abstractmethod
    def begin_batch(self, chunk: Chunk) -> Any:
        """Returns what ``do_row`` needs, such as the memory for all rows."""

    @abstractmethod
    def do_row(self, batch: Any, index: int, sample: Any) -> None:
        """Do row ``index``, on ``sample`` in place of the batch's own if it is not None."""

    @abstractmethod
    def end_batch(self, batch: Any, kept: Sequence[int]) -> Chunk:
        """The finished batch; ``kept`` are the rows that succeeded, in order, at least one."""


class Memo(Operator):
    """A cache of what the stages above made from a sample: on a hit the source skips these stages and sends a
    ``pipegraph.engine.stage.cache_wiring.Hit``. Between it and a random-access source are only one-to-one stages
    that depend on their item alone."""

    @abstractmethod
    def attach(self, index_of: Callable[[int, int], Any], digest: str) -> None:
        """Called before ``open``: ``index_of(position, epoch)`` gives an index; ``digest`` is of the stages above."""

    @abstractmethod
    def lookup(self, index: Any) -> Any:
        """A ``Hit`` for the source's sample ``index``, or None; called by the source's workers, after ``open``."""


class Regroup(Operator):
    """An operator that regroups chunks into other chunks: one worker, in order.

    Without a state its groups must consist of consecutive whole chunks, as ``Chunk.group`` makes them: a restart
    resumes after the last group, with nothing held. An operator that carries a remainder over, interleaves groups or
    leaves samples out keeps what it holds, chunks included, in its ``state_dict()``.

    If its chunks do not carry the lineages of their samples, it lists in ``spent``, after each call, the samples that
    it no longer holds; the engine removes them from the list.

    When its ``process`` or ``flush`` raises, it sets ``failing`` to the chunks that failed and that it has released;
    by default the chunk given has failed.
    """

    kind: ClassVar[Kind] = "regroup"
    failing: Sequence[Chunk] = ()
    spent: list[Lineage] | None = None
    group_of: Callable[[Any], Any] | None = None
    """The key function of an operator that groups samples: maps a sample to its group."""
    consecutive: bool = False
    """Whether its groups are known to consist of consecutive whole chunks, so that the engine need not check them."""
    one_to_one = False
    shareable = False
    drop_last: bool = False
    """Whether it leaves out a last group that is not full."""

    def begin(self) -> None:
        """A run begins (perhaps after one that was broken off): drop everything held."""

    def emits_next(self) -> bool:
        """Whether the next ``process`` may make a chunk; memory is then reserved for it."""
        return True

    def group_size(self, world_size: int = 1) -> int:
        """Samples in one group (for operators with ``bundles``)."""
        raise NotImplementedError(f"{type(self).__name__} does not take bundles")

    def packing(self) -> Callable[[list[Any]], Any] | None:
        """A function that packs samples in the thread that makes them; :meth:`take_bundle` accepts its result.

        The function is thread-safe. It returns an object with ``part(start, stop)``, ``rows()`` and ``buffers()``, or
        None for samples that it cannot pack.
        """
        return None

    def fills(self, rows: int) -> bool:
        """Whether ``rows`` more samples complete a group; memory is then reserved for it."""
        return True

    def missing(self) -> int:
        """The maximum number of samples to give it next: those missing from the open group."""
        return self.group_size()

    def take_bundle(self, bundle: Bundle) -> Sequence[Chunk]:
        """As ``process`` for each sample of the bundle, at most :meth:`missing` (for operators with ``bundles``)."""
        raise NotImplementedError(f"{type(self).__name__} does not take bundles")

    def handed_on(self, cursor: Cursor, more: int, draw: tuple[Any, ...]) -> tuple[Cursor, str, int] | None:
        """How much of its input had left the operator when a rank was at a cursor of the output. None if that is not
        known, else: the input cursor before which all had left; the steps after it that had left too (see
        ``pipegraph.order.left.Taken``); and the number of samples after both.

        Args:
            more: samples of its output after ``cursor`` that have left too.
            draw: (seed, epoch, stage).
        """
        return None if more and not self.consecutive else (cursor, "", more)

    def flush(self) -> Iterable[Chunk]:
        """The remaining chunks at the end of an epoch; the next chunk begins a new epoch."""
        return ()


class FanIn(Operator):
    """An operator with several inputs and one output; its state alone decides in which order inputs are read.

    A resume begins a copy, gives it a cursor of one of its outputs, and reads each input from the position that it
    returns. So a cursor holds the positions of the inputs and whatever else :meth:`next_input` depends on. It is a
    nested tuple of JSON values (a dict in it is not compared), and grows from output to output: put positions, or a
    count of outputs, first. An output consists of items that were taken since the output before it.
    """

    kind: ClassVar[Kind] = "merge"
    inputs: int | Literal["many"] = "many"
    one_to_one = False
    shareable = False
    follows_route: bool = False
    separate: bool = False
    """Whether the rest of each input can be redistributed to another number of ranks independently."""
    pairs: bool = False
    """Whether it combines the items at the same position of all inputs."""
    consecutive: bool = False
    """Whether its cursors are known to grow and to hold its state, so that the engine need not check them."""

    def begin(self, inputs: int, epoch: int) -> None:
        """A new epoch over ``inputs`` upstream nodes begins."""

    def check_inputs(self, count: int) -> None:
        """Raises GraphError if this many inputs do not fit."""

    def follow(self, route: str, outputs: tuple[int, ...]) -> None:
        """Input i is fed by output ``outputs[i]`` of ``route`` (for operators with ``follows_route``)."""

    @abstractmethod
    def next_input(self) -> int | None:
        """The input from which to take the next chunk; None when the epoch is over."""

    @abstractmethod
    def end_input(self, index: int) -> None:
        """Input ``index`` has no more chunks in this epoch."""

    def turn(self, mark: Any) -> bool:
        """Handle a ``Mark`` of a ``Route``; False if it is not for this operator."""
        return False

    def merged_length(self, lengths: Sequence[int]) -> int | None:
        """Chunks out per epoch for the given chunks in; None if it depends on the data."""
        return None

    def process(self, chunk: Chunk) -> Chunk | None:
        return chunk

    @abstractmethod
    def cursor(self, positions: Sequence[Cursor]) -> Cursor:
        """The output's cursor when input i is at ``positions[i]`` (None: its start). A pure function."""

    @abstractmethod
    def cursors(self, cursor: Cursor, inputs: int) -> Sequence[Cursor]:
        """Restore the state of ``cursor``, after ``begin``; returns the position of each input in it."""


class FanOut(Operator):
    """An operator with one input and several outputs; each chunk goes to one of them."""

    kind: ClassVar[Kind] = "route"
    shareable = False

    def process(self, chunk: Chunk) -> Chunk:
        return chunk

    @abstractmethod
    def choose(self, chunk: Chunk) -> int:
        """The number of the output that gets this chunk, 0 .. outputs-1.

        A pure function of the chunk, which it leaves as it is: the engine asks twice and compares.
        """
