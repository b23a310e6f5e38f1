"""Rewrites that make a graph faster and never change what it delivers. Pure.

Each rewrite takes the planned stages by name, in topological order, and replaces some of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipegraph.backends import THREAD, Ray
from pipegraph.contracts import Operator
from pipegraph.errors import GraphError
from pipegraph.planning.plan import StagePlan
from pipegraph.stage_spec import Edge

MAX_INLINE = 64
"""Inline stages in a row: each is driven from inside the next, by four calls of Python's 1,000."""


def leave_out_copies(planned: dict[str, StagePlan], output: Edge) -> None:
    """A copy to one device that is only there to be scattered goes: each slice is copied straight from the host."""
    for name, stage in list(planned.items()):
        if stage.traits.moves != "device" or stage.bypassed is not None or output.stage == name:
            continue
        readers = _readers(name, planned)
        if readers and all(reader.traits.moves == "slices" for reader in readers):
            _leave_out(name, planned, "each slice is copied straight from the host to its device")


def _readers(name: str, planned: Mapping[str, StagePlan]) -> list[StagePlan]:
    """The running stages that read from a stage."""
    return [
        stage
        for stage in planned.values()
        if stage.bypassed is None and any(edge.stage == name for edge in stage.upstream)
    ]


def _leave_out(name: str, planned: dict[str, StagePlan], why: str, within: str | None = None) -> None:
    """The stage does not run; the stages below it read from the stage above it."""
    planned[name] = replace(planned[name], bypassed=why, within=within)
    for other in list(planned.values()):
        upstream = tuple(shortcut(edge, planned) for edge in other.upstream)
        planned[other.name] = replace(other, upstream=upstream)


def repeat_sources(planned: dict[str, StagePlan], output: Edge) -> None:
    """Sources that a stage below needs to be read several times in an epoch."""
    for stage in list(planned.values()):
        repeated, endless = stage.traits.repeated, stage.traits.endless
        if repeated is None:
            continue
        for edge in stage.spec.upstream:
            source = _source_above(stage, edge, planned, output)
            assert source.source is not None
            again = repeated(source.source)
            note = f"is read several times in an epoch, for {stage.name!r}"
            spec = replace(source.spec, operator=again)
            planned[source.name] = replace(source, spec=spec, notes=(*source.notes, note))
        taking = _ending_below(stage, planned)
        if taking is not None and endless is not None:
            note = f"reads its inputs again until {taking!r} ends the epoch"
            spec = replace(stage.spec, operator=endless())
            planned[stage.name] = replace(stage, spec=spec, notes=(*stage.notes, note))


def _ending_below(stage: StagePlan, planned: Mapping[str, StagePlan]) -> str | None:
    """The stage that ends an epoch below this one, if only a chain of stages with one input each lies between."""
    while True:
        readers = _readers(stage.name, planned)
        if len(readers) != 1 or len(readers[0].upstream) != 1:
            return None
        (stage,) = readers
        if stage.traits.ends:
            return stage.name
        if stage.kind.hands_on:
            return None


def _source_above(stage: StagePlan, edge: Edge, planned: Mapping[str, StagePlan], output: Edge) -> StagePlan:
    """The source from which one chain of stages leads to an input of ``stage``, and nowhere else."""
    while True:
        above = planned[edge.stage]
        readers = [s for s in planned.values() if any(each.stage == above.name for each in s.spec.upstream)]
        why = None
        if len(readers) > 1 or output.stage == above.name:
            why = f"{above.name!r} feeds others too"
        elif above.kind.hands_on:
            why = (
                f"{above.name!r} ({above.operator.name}) joins, splits or ends the stream of the whole epoch"
            )
        if why is not None:
            raise GraphError(
                f"stage {stage.name!r}: it reads its inputs several times in an epoch, each from one source by a chain "
                f"of stages, but {why}; repeat the sources before that, with Repeat(times)"
            )
        if above.source is not None:
            return above
        edge = above.spec.upstream[0]


def read_in_rows(planned: dict[str, StagePlan], output: Edge) -> None:
    """A reader before a ``Batch`` that is inline, or in processes or actors like those of the stage behind, has none of
    its own: the workers that process the batch's rows read them. So encoded bytes never cross between two processes.
    """
    for below in list(planned.values()):
        if below.bypassed is not None or below.backend.in_consumer or len(below.upstream) != 1:
            continue
        batch = planned[below.upstream[0].stage]
        if not batch.traits.stacks:
            continue
        reader = planned[batch.upstream[0].stage]
        alone = all(_only_reader(s, planned, output) for s in (reader, batch))
        same = reader.backend.in_consumer or (
            not below.backend.in_trainer and _placement(reader) == _placement(below)
        )
        if not alone or not same or not _plain(reader, batch, below):
            continue
        both = below.traits.take_in_reading(reader.operator, reader.name)
        if both is None:
            continue
        planned[below.name] = replace(below, fused=both, notes=_notes_of(below, both))
        _leave_out(reader.name, planned, f"its work is done in {below.name!r}, row by row", below.name)


def _plain(*stages: StagePlan) -> bool:
    """Whether these stages have no error policy, and keep the order."""
    return all(stage.spec.on_error == "raise" and stage.spec.ordered for stage in stages)


def _only_reader(stage: StagePlan, planned: Mapping[str, StagePlan], output: Edge) -> bool:
    """Whether exactly one stage, and not the loader, reads from this one."""
    return len(_readers(stage.name, planned)) == 1 and output.stage != stage.name


def _notes_of(stage: StagePlan, fused: Operator) -> tuple[str, ...]:
    """The stage's notes, with those of ``fused`` in place of its operator's."""
    alone = stage.traits.notes()
    return (*(note for note in stage.notes if note not in alone), *fused.traits.notes())


def fuse(planned: dict[str, StagePlan], output: Edge) -> None:
    """Two neighbouring stages become one where the upper operator can do the lower one's work in the same go."""
    for name, below in list(planned.items()):
        if below.bypassed is not None or len(below.upstream) != 1:
            continue
        above = planned[below.upstream[0].stage]
        plain = above.backend == below.backend and not below.backend.in_consumer
        plain = plain and above.spec.ordered and below.spec.ordered
        plain = plain and above.spec.timeout == below.spec.timeout
        if not plain or below.spec.on_error != "raise" or not _only_reader(above, planned, output):
            continue
        fused = above.traits.take_in(below.work)
        if fused is None:
            continue
        planned[above.name] = replace(
            above,
            fused=fused,
            notes=_notes_of(above, fused),
            spec=replace(
                above.spec,
                max_bytes=below.spec.max_bytes or above.spec.max_bytes,
                tuned=tuple({*above.spec.tuned, *below.spec.tuned}),
            ),
            workers=max(above.workers, below.workers),
            capacity=above.capacity if below.spec.capacity is None else below.capacity,
            level=below.level,
        )
        _leave_out(name, planned, f"its work is done in {above.name!r}, in one go", above.name)


def _placement(stage: StagePlan) -> tuple[Any, ...]:
    """Where a stage works, and with how many workers."""
    spec = stage.spec
    actors = (stage.backend.resources, stage.backend.runtime_env) if isinstance(stage.backend, Ray) else None
    return stage.backend, stage.workers, spec.timeout, actors


def part_inline(planned: dict[str, StagePlan]) -> None:
    """Give a thread to every stage at which too many inline ones in a row would nest too deep."""
    nested: dict[str, int] = {}
    for stage in planned.values():
        if stage.bypassed is not None:
            continue
        above = max([nested[shortcut(edge, planned).stage] for edge in stage.upstream], default=0)
        nested[stage.name] = above + 1 if stage.backend.in_consumer else 0
        if nested[stage.name] > MAX_INLINE:
            nested[stage.name] = 0
            why = f"runs in a thread of its own: more than {MAX_INLINE} inline stages in a row would nest too deep"
            planned[stage.name] = replace(stage, backend=THREAD, notes=(*stage.notes, why))


def choose_memory(planned: dict[str, StagePlan], output: Edge) -> None:
    """Slabs that copies alone read are made for them: pinned where these gain from it, so that a Pin between has
    nothing to do. Pinned memory that anybody else may send to a device is torch's own, which knows who reads it."""
    for name in list(planned):
        stage = planned[name]
        if stage.bypassed is not None or stage.source is not None:
            continue
        readers = _readers(name, planned)
        alone = _copies_alone(name, planned, output)
        if stage.traits.moves == "pinned":
            how = (
                "all fields of a chunk are written into one pinned slab"
                if alone
                else "each tensor is pinned by itself"
            )
            memory = "pinned" if alone else "delivered"
            planned[name] = replace(stage, memory=memory, notes=(*stage.notes, how))
        if not stage.traits.slabs:
            continue
        pins = (
            []
            if not stage.backend.in_trainer
            else [reader for reader in readers if reader.traits.moves == "pinned"]
        )
        if alone:
            where = (
                "its slabs lie in pinned memory"
                if stage.backend.in_trainer
                else "its batches come from elsewhere: the copy gathers them in pinned memory"
            )
            planned[name] = replace(stage, memory="pinned", notes=(*stage.notes, where))
            for pin in pins:
                _leave_out(pin.name, planned, f"the slabs of {name!r} are pinned already")
        elif stage.backend.in_trainer and (pins or any(map(_reads_pinned, readers))):
            notes = (*stage.notes, "its batches lie in pinned memory of torch's own")
            planned[name] = replace(stage, memory="delivered", notes=notes)
        elif any(s.traits.moves == "device" for s in readers):
            planned[name] = replace(stage, memory="staged")


def _reads_pinned(stage: StagePlan) -> bool:
    return stage.traits.pinned_for() is not None


def _copies_alone(name: str, planned: Mapping[str, StagePlan], output: Edge) -> bool:
    """Whether only copies that gain from pinned memory read a stage's chunks, directly or through a Pin."""
    readers = [] if shortcut(output, planned).stage == name else _readers(name, planned)
    return bool(readers) and all(
        _reads_pinned(s) or (s.traits.moves == "pinned" and _copies_alone(s.name, planned, output))
        for s in readers
    )


def shortcut(edge: Edge, planned: Mapping[str, StagePlan]) -> Edge:
    """The edge that carries the chunks once stages that were left out are passed over."""
    while planned[edge.stage].bypassed is not None:
        edge = planned[edge.stage].upstream[0]
    return edge
