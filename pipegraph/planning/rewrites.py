"""Rewrites that make a graph faster and never change what it delivers. Pure.

Each takes the draft of a plan, and replaces some of its stages. The last chooses the edges on which rows travel in
bundles, and their maximum size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipegraph.backends import INLINE, Ray
from pipegraph.contracts import Operator
from pipegraph.planning.plan import StagePlan
from pipegraph.stage_spec import Edge


class Draft(dict[str, StagePlan]):
    """The stages by name, in topological order, and the edge whose chunks the loader delivers."""

    def __init__(self, output: Edge) -> None:
        super().__init__()
        self.output = output

    def change(self, name: str, *notes: str, **changes: Any) -> StagePlan:
        """Replace some of a stage's fields; ``notes`` are added to its own."""
        stage = self[name]
        self[name] = replace(stage, **{"notes": (*stage.notes, *notes), **changes})
        return self[name]

    def running(self) -> list[StagePlan]:
        """The stages that run so far."""
        return [stage for stage in self.values() if stage.runs]

    def above(self, stage: StagePlan) -> StagePlan:
        """The stage that feeds its first input."""
        return self[stage.upstream[0].stage]

    def readers(self, name: str) -> list[StagePlan]:
        """The running stages that read from a stage."""
        return [stage for stage in self.running() if any(edge.stage == name for edge in stage.upstream)]

    def sole_reader(self, stage: StagePlan) -> StagePlan | None:
        """The one stage that reads from this one; None if others do, or the loader."""
        readers = [] if self.shortcut(self.output).stage == stage.name else self.readers(stage.name)
        return readers[0] if len(readers) == 1 else None

    def shortcut(self, edge: Edge) -> Edge:
        """The edge that carries the chunks once stages that were left out are passed over."""
        while not self[edge.stage].runs:
            edge = self[edge.stage].upstream[0]
        return edge

    def leave_out(self, name: str, why: str, within: str | None = None) -> None:
        """The stage does not run; the stages below it read from the stage above it."""
        self.change(name, left_out=why, within=within)
        for other in self.readers(name):
            self.change(other.name, upstream=tuple(map(self.shortcut, other.upstream)))


def leave_out_copies(draft: Draft) -> None:
    """A copy to one device that is only there to be scattered goes: each slice is copied straight from the host."""
    for stage in draft.running():
        readers = draft.readers(stage.name)
        scattered = bool(readers) and all(reader.traits.moves == "slices" for reader in readers)
        if stage.traits.moves == "device" and scattered and draft.output.stage != stage.name:
            draft.leave_out(stage.name, "each slice is copied straight from the host to its device")


def read_in_rows(draft: Draft) -> None:
    """A reader before a ``Batch`` that is inline, or in processes or actors like those of the stage behind, has none of
    its own: the workers that process the batch's rows read them. So encoded bytes never cross between two processes.
    """
    for name in list(draft):
        below = draft[name]
        if not below.runs or below.backend.in_consumer or len(below.upstream) != 1:
            continue
        batch = draft.above(below)
        if not batch.traits.stacks or draft.sole_reader(batch) is not below:
            continue
        reader = draft.above(batch)
        same = reader.backend.in_consumer or (below.remote and _placement(reader) == _placement(below))
        if not same or draft.sole_reader(reader) is not batch or not _plain(reader, batch, below):
            continue
        both = below.traits.take_in_reading(reader.operator, reader.name)
        if both is not None:
            draft.change(below.name, fused=both, notes=_notes_of(below, both))
            why = f"its work is done in {below.name!r}, row by row"
            draft.leave_out(reader.name, why, below.name)


def _plain(*stages: StagePlan) -> bool:
    """Whether these stages have no error policy, and keep the order."""
    return all(stage.spec.on_error == "raise" and stage.spec.ordered for stage in stages)


def _notes_of(stage: StagePlan, fused: Operator) -> tuple[str, ...]:
    """The stage's notes, with those of ``fused`` in place of its operator's."""
    alone = stage.traits.notes()
    return (*(note for note in stage.notes if note not in alone), *fused.traits.notes())


def fuse(draft: Draft) -> None:
    """Two neighbouring stages become one where the upper operator can do the lower one's work in the same go."""
    for name in list(draft):
        below = draft[name]
        if not below.runs or below.backend.in_consumer or len(below.upstream) != 1:
            continue
        above = draft.above(below)
        spec, other = above.spec, below.spec
        follows = other.backend is None and above.remote  # it would leave each result where it was made
        alike = (follows or above.backend == below.backend) and spec.timeout == other.timeout
        if not alike or not spec.ordered or not _plain(below) or draft.sole_reader(above) is not below:
            continue
        fused = above.traits.take_in(below.work)
        if fused is None:
            continue
        tuned = tuple({*spec.tuned, *other.tuned})
        draft.change(
            above.name,
            fused=fused,
            notes=_notes_of(above, fused),
            spec=replace(spec, max_bytes=other.max_bytes or spec.max_bytes, tuned=tuned),
            workers=max(above.workers, below.workers),
            capacity=above.capacity if other.capacity is None else below.capacity,
            level=below.level,
        )
        draft.leave_out(below.name, f"its work is done in {above.name!r}, in one go", above.name)


def read_below(draft: Draft) -> None:
    """A light source has no thread of its own: the stage that alone reads it does so in its threads. A hand-over would
    take longer than reading. Not one in processes, whose threads take items ahead.
    """
    for below in draft.running():
        if below.backend.in_consumer or below.remote or len(below.upstream) != 1:
            continue
        source, spec = draft.above(below), draft.above(below).spec
        left_open = spec.backend is None and spec.workers == 1 and not spec.tuned
        if source.traits.light and left_open and draft.sole_reader(source) is below:
            draft.change(source.name, backend=INLINE)


def _placement(stage: StagePlan) -> tuple[object, ...]:
    """Where a stage works, and with how many workers."""
    spec = stage.spec
    actors = (stage.backend.resources, stage.backend.runtime_env) if isinstance(stage.backend, Ray) else None
    return stage.backend, stage.workers, spec.timeout, actors


def choose_memory(draft: Draft) -> None:
    """Slabs that copies alone read are made for them: pinned where these gain from it, so that a Pin between has
    nothing to do. Pinned memory that anybody else may send to a device is torch's own, which knows who reads it."""
    for name in list(draft):
        stage = draft[name]
        if not stage.runs:
            continue
        readers = draft.readers(name)
        alone = _copies_alone(name, draft)
        if stage.traits.moves == "pinned":
            slab = "all fields of a chunk are written into one pinned slab"
            how = slab if alone else "each tensor is pinned by itself"
            draft.change(name, how, memory="pinned" if alone else "delivered")
        if not stage.traits.slabs:
            continue
        pins = [reader.name for reader in readers if reader.traits.moves == "pinned" and not stage.remote]
        if alone:
            gathered = "its batches come from elsewhere: the copy gathers them in pinned memory"
            draft.change(
                name, gathered if stage.remote else "its slabs lie in pinned memory", memory="pinned"
            )
            for pin in pins:
                draft.leave_out(pin, f"the slabs of {name!r} are pinned already")
        elif pins or (not stage.remote and any(map(_reads_pinned, readers))):
            draft.change(name, "its batches lie in pinned memory of torch's own", memory="delivered")
        elif any(reader.traits.moves == "device" for reader in readers):
            draft.change(name, memory="staged")


def _reads_pinned(stage: StagePlan) -> bool:
    return stage.traits.pinned_for() is not None


def _copies_alone(name: str, draft: Draft) -> bool:
    """Whether only copies that gain from pinned memory read a stage's chunks, directly or through a Pin."""
    readers = [] if draft.shortcut(draft.output).stage == name else draft.readers(name)
    return bool(readers) and all(
        _reads_pinned(each) or (each.traits.moves == "pinned" and _copies_alone(each.name, draft))
        for each in readers
    )


ROWS_PER_WORKER = 1024
"""Default capacity of a queue of rows below a source, if they are light (``contents.LIGHT_BYTES``)."""


def bundle_rows(draft: Draft) -> None:
    """Set for each stage the maximum number of rows that it hands over together."""
    for stage in draft.running():
        if _hands_over_rows(stage, draft):
            draft.change(stage.name, bundle_rows=max(1, stage.capacity // stage.workers))
    for stage in draft.running():
        for edge in stage.upstream:
            _lengthen(stage, _chain_above(edge, draft), draft)


def _hands_over_rows(stage: StagePlan, draft: Draft) -> bool:
    """Whether a stage makes rows for a single consumer.

    One above a cache makes those rows that are not in it. With several consumers, one may wait for a row while another,
    whose queue is full, keeps the bundle from being sent.
    """
    if stage.cached_in is not None or stage.level not in ("sample", "part"):
        return False
    edges = [draft.shortcut(draft.output), *(edge for each in draft.running() for edge in each.upstream)]
    return [edge.stage for edge in edges].count(stage.name) == 1 and stage.kind.hands_over_rows(stage)


def _lengthen(below: StagePlan, chain: list[StagePlan], draft: Draft) -> None:
    """Lengthen the queues between a source and a stage; above a ``Batch``, bundles end where a batch ends."""
    capacities = {
        stage.name: stage.spec.capacity or max(stage.capacity, ROWS_PER_WORKER * stage.workers)
        for stage in chain
    }
    # Each worker's bundle has room in the queue: no worker waits for another's to be taken.
    rows = min((capacities[stage.name] // stage.workers for stage in chain), default=0)
    size = below.group_size() if all(stage.one_to_one for stage in chain if stage.source is None) else None
    if size is not None:
        rows -= rows % size if rows >= size else 0
    for stage in chain if rows > 1 else ():
        bundle = stage.bundle if size is None else below.name
        draft.change(stage.name, capacity=capacities[stage.name], bundle=bundle, bundle_rows=rows)


def _chain_above(edge: Edge, draft: Draft) -> list[StagePlan]:
    """The stages from a source to an edge; none if one of them does not hand over rows together."""
    chain: list[StagePlan] = []
    while True:
        stage = draft[edge.stage]
        if stage.bundle_rows == 1:
            return []
        chain.append(stage)
        if stage.source is not None:
            return chain
        if len(stage.upstream) != 1:
            return []
        edge = stage.upstream[0]
