"""What an operator or source is and can, beyond its contract: one record, which the plan reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pipegraph.contracts import Operator, Source


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Given by an operator as ``traits``, a class attribute or a property. Reading it touches no data and no device.

    What the engine calls while it runs are methods of the operator, named here beside the trait that says that it has
    them. What the plan asks is the value of a trait, or the method itself.

    Attributes:
        in_trainer: it works on devices, files or memory of the training process, so it cannot be opened in another one.
        seeds_itself: it has no user code that draws from torch's global generator, or selects the sample's generator by
            itself; else the engine does so before each call.
        trusted: its resumes are exact by its own tests, so ``pg.testing`` need not check it. It calls no code of the
            user's for positions, its groups leave in order, and its cursors are tuples.
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
        repeated: the source to read several times in an epoch in place of the one above an input.
        endless: the operator to run where a stage below ends the epoch (``ends``).
        length_for: as ``length``, on each of so many ranks.
        key: the key of a sample, if it puts samples with the same key next to each other.
        pairs: a fan-in that combines the items at the same position of all inputs.
        separate: a fan-in, the rest of whose inputs can be redistributed to another number of ranks independently.
        ends: a fan-in of one input that ends an epoch after a number of items, however many its input has.
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
    repeated: Callable[[Source], Source] | None = None
    endless: Callable[[], Operator] | None = None
    length_for: Callable[[int, int], int | None] | None = None
    key: Callable[[Any], Any] | None = None
    pairs: bool = False
    separate: bool = False
    ends: bool = False
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
