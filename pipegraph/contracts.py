"""The interfaces of operators and sources: everything that the engine knows about them.

An operator is described once, in the graph, and *opened* by each worker on its own shallow copy:
``open(context)``, then ``process`` for every chunk, then ``close``. User functions inside it are
shared by all copies. ``kind`` says how the engine treats what ``process`` returns:

=========== ============================================== =====================================
kind        ``process(chunk)`` returns                     also
=========== ============================================== =====================================
``map``     a chunk; with ``one_to_one = False`` or None
``rows``    a chunk                                         ``begin_batch``, ``do_rows``, ``do_row``, ``end_batch``
``expand``  an iterable of chunks, made by ``chunk.child`` ``flush`` is never called
            or ``chunk.row``
``regroup`` an iterable of chunks, made by ``Chunk.group`` ``flush()`` once at each epoch's end
``fan_in``  a chunk or None; from ``input``                 ``next_input()``, ``end_input(i)``
``route``   the chunk; ``choose(chunk)`` names the output  ``outputs``
=========== ============================================== =====================================

Plan, length, elasticity and digest follow from these declarations alone, without running anything. An operator can do
only what it declares: nothing is inferred from a name, or from a method that may exist for another reason. What only
some operators have to say is in their ``traits``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, final

from pipegraph.chunk import Chunk, Cursor, Lineage
from pipegraph.components import (
    Component as Component,
    Context as Context,
    Drawn as Drawn,
    DrawnRows as DrawnRows,
    History as History,
    Kind as Kind,
    Source as Source,
    Traits as Traits,
    history_of as history_of,
)

STATE_METHODS = ("state_dict", "load_state_dict")
ONE_TO_ONE = ("map", "rows")
"""Kinds that make at most one chunk of each."""

DEPENDENCES = ("item", "place", "epoch", "random")
"""The words of ``Operator.depends_on``."""


class Operator(Component):
    """What a stage does with chunks; subclass it, name its ``kind``, define ``process``.

    Attributes:
        kind: see the module docstring.
        needs: its input: ``"sample"``, ``"batch"``, ``"batches"`` (lists of batches), ``"part"``, several as
            ``"sample|part"``, or ``"any"``.
        gives: its output: ``"sample"``, ``"batch"``, ``"batches"`` or ``"same"``.
        one_to_one: whether it is a map that never drops.
        depends_on: what its result depends on: ``"item"`` (what it is given, and its own parameters), and ``"place"``
            (in the stream), ``"epoch"`` and ``"random"`` (numbers that it draws) where it uses these, as
            ``"item|epoch"``. A ``Cache`` below is allowed only for ``"item"``; None: not declared.
    """

    kind: ClassVar[Kind] = "map"
    needs: str = "any"
    gives: str = "same"
    one_to_one: bool = True
    depends_on: str | None = None

    @property
    def stateful(self) -> bool:
        """Whether it needs state gathered from earlier chunks to resume: it then runs in order with one worker.

        An operator says so by defining ``state_dict()`` and ``load_state_dict(state)`` (JSON) in its own class, or
        with ``stateful = True``. ``stateful = False`` says that such methods serve another purpose. An operator that
        inherits them from a class that is not an operator must set it either way.
        """
        return all(issubclass(_definer(type(self), name), Operator) for name in STATE_METHODS)

    @abstractmethod
    def process(self, chunk: Chunk) -> Any:
        """See the table in the module docstring; called by one worker at a time on its copy."""

    def length(self, n: int) -> int | None:
        """Chunks out per epoch for ``n`` in; None if it depends on the data."""
        return n if self.kind in ONE_TO_ONE and self.one_to_one else None

    @property
    @final
    def elastic(self) -> bool:
        """Whether a sample's result never depends on its neighbours: one-to-one stages and plain (un)batching."""
        return (self.kind in ONE_TO_ONE and self.one_to_one) or self.traits.independent


def _definer(kind: type, name: str) -> type:
    """The class that defines a method; ``object`` if none does."""
    return next((each for each in kind.__mro__ if name in vars(each)), object)


class RowOperator(Operator):
    """A one-to-one operator that works, and fails, sample by sample, even on batches.

    One worker begins a batch, all workers of the stage do its rows in parallel, and the worker that did the last row
    ends it; in a process or an actor one worker does all of it. For a chunk of a single sample only ``process`` is
    called.
    """

    kind: ClassVar[Kind] = "rows"

    @abstractmethod
    def begin_batch(self, chunk: Chunk) -> Any:
        """Returns what ``do_row`` needs, such as the memory for all rows."""

    def do_rows(self, batch: Any, first: int, stop: int) -> None:
        """Do at once what can be of the rows from ``first`` on; ``do_row`` follows for each of them.

        An exception is no row's: ``do_row`` then does each of them. It is not called in a process of a stage with a
        ``timeout``, nor after a death.
        """

    @abstractmethod
    def do_row(self, batch: Any, index: int) -> None:
        """Do row ``index``, or what ``do_rows`` has left of it."""

    @abstractmethod
    def end_batch(self, batch: Any, kept: Sequence[int]) -> Chunk:
        """The finished batch; ``kept`` are the rows that succeeded, in order, at least one."""


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
    one_to_one = False
    failing: Sequence[Chunk] = ()
    spent: list[Lineage] | None = None
    drop_last: bool = False
    """Whether it leaves out a last group that is not full."""

    def begin(self) -> None:
        """A run begins (perhaps after one that was broken off): drop everything held."""

    def flush(self) -> Iterable[Chunk]:
        """The remaining chunks at the end of an epoch; the next chunk begins a new epoch."""
        return ()

    def resume(self, cursor: Cursor) -> Cursor:
        """Prepare to resume at ``cursor`` (of one of this operator's chunks); returns the cursor at which the input
        must restart. Called before the first item of a restored epoch."""
        return cursor

    def handed_on(self, cursor: Cursor, more: int, draw: tuple[Any, ...]) -> tuple[Cursor, str, int] | None:
        """How much of its input had left the operator when a rank was at a cursor of the output. None if that is not
        known, else: the input cursor before which all had left; the steps after it that had left too (see
        ``pipegraph.order.left.Taken``); and the number of samples after both.

        Args:
            more: samples of its output after ``cursor`` that have left too.
            draw: (seed, epoch, stage).
        """
        return None if more and not self.traits.trusted else (cursor, "", more)


class FanIn(Operator):
    """An operator with several inputs and one output; its state alone decides in which order inputs are read.

    A resume begins a copy, gives it a cursor of one of its outputs, and reads each input from the position that it
    returns. So a cursor holds the positions of the inputs and whatever else :meth:`next_input` depends on. It is a
    nested tuple of JSON values (a dict in it is not compared), and grows from output to output: put positions, or a
    count of outputs, first. An output consists of items that were taken since the output before it.
    """

    kind: ClassVar[Kind] = "fan_in"
    one_to_one = False
    inputs: int | Literal["many"] = "many"
    """Number of upstream nodes."""

    def begin(self, inputs: int, epoch: int) -> None:
        """A new epoch over ``inputs`` upstream nodes begins."""

    @abstractmethod
    def next_input(self) -> int | None:
        """The input from which to take the next chunk; None when the epoch is over."""

    @abstractmethod
    def end_input(self, index: int) -> None:
        """Input ``index`` has no more chunks in this epoch."""

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
    outputs: int = 1

    def process(self, chunk: Chunk) -> Chunk:
        return chunk

    @abstractmethod
    def choose(self, chunk: Chunk) -> int:
        """The number of the output that gets this chunk, 0 .. outputs-1.

        A pure function of the chunk, which it leaves as it is.
        """
