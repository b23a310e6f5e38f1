"""What a run takes on trust of users' own operators: checked while all stages run in one thread, in turn."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from pipegraph.chunk import Chunk, Lineage
from pipegraph.contracts import FanIn, FanOut, Regroup, Source
from pipegraph.engine.kinds.regroup import resumes_itself
from pipegraph.engine.stage.cursors import detached, earlier, freeze
from pipegraph.testing.outcome import MakeGraph, disguised, is_ordered, placed

MOST = 1_000
"""Items of a source that are looked at."""

Tell = Callable[[str], None]
"""Notes what is wrong with a stage."""


def assert_operators_keep_their_word(make_graph: MakeGraph, epochs: int, options: dict[str, Any]) -> None:
    """Run a graph of which each source, regrouping operator, fan-in and route of the user's own is checked.

    Raises:
        AssertionError: one breaks its contract; says which, and how.
    """
    graph, wrong = placed(make_graph(), "inline", 1), []
    ordered, any_checked = is_ordered(graph), False

    def teller(stage: str) -> Tell:
        return lambda what: wrong.append(f"stage {stage!r}: {what}")

    for name, spec in graph.stages.items():
        methods = _methods_of(spec.operator, teller(name), ordered)
        if methods and not spec.operator.traits.trusted:
            any_checked = True
            graph.stages[name] = replace(spec, operator=disguised(spec.operator, methods))
    if not any_checked:
        return
    try:
        with graph.loader(epochs=epochs, **options) as loader:
            for _ in range(epochs):
                deque(loader.chunks(), maxlen=0)
    except Exception:
        if not wrong:
            raise
    assert not wrong, wrong[0]


def _methods_of(operator: Any, tell: Tell, ordered: bool) -> dict[str, Any]:
    if isinstance(operator, Source):
        return _of_source(type(operator), tell, ordered)
    if isinstance(operator, FanIn):
        return _of_fan_in(type(operator), tell, ordered)
    if isinstance(operator, FanOut):
        return _of_route(type(operator), tell)
    if isinstance(operator, Regroup) and ordered and not operator.stateful and not resumes_itself(operator):
        return _of_regroup(type(operator), tell)
    return {}


def _of_source(kind: Any, tell: Tell, ordered: bool) -> dict[str, Any]:
    """It yields the same positions in each call, from step ``start`` on, each once, and as many as it says."""
    method = "positions" if kind.random_access else "iterate"

    def begins(self: Any, epoch: int, rank: int, world_size: int, start: int) -> Any:
        def places(step: int, by: str = method, most: int = MOST) -> list[Any]:
            with torch.random.fork_rng(devices=[]):
                found = getattr(kind, by)(self, epoch, rank, world_size, step)
                return [each[0] if isinstance(each, tuple) else each for each in islice(found, most)]

        whole = places(0)
        length = self.length(epoch, rank, world_size)
        if len(set(whole)) < len(whole):
            tell("two items of an epoch have one position: give each a position of its own")
        if len(whole) < MOST and length is not None and length != len(whole):
            tell(f"length() says that epoch {epoch} has {length} items, and it has {len(whole)}")
        for step in {0, 1, len(whole) // 2, len(whole)}:
            if (found := places(step, most=len(whole) - step if len(whole) == MOST else MOST)) != whole[
                step:
            ]:
                tell(
                    f"{method} yields the positions {found[:3]} for start={step}, and those from step {step} on were "
                    f"{whole[step : step + 3]}: begin with step `start`, and depend on the arguments alone"
                )
        if kind.random_access and kind.iterate is not Source.iterate and places(0, "iterate") != whole:
            tell("iterate yields other positions than positions")
        if not ordered and not kind.random_access:
            said = list(self.positions_of(range(len(whole)), epoch, rank, world_size))
            if said and said != whole:
                tell(
                    "positions_of says other positions than iterate yields (by default rank r of W has r, r+W, r+2W "
                    "...), and a resume below a stage with ordered=False needs both to agree"
                )
        return getattr(kind, method)(self, epoch, rank, world_size, start)

    return {method: begins}


def _of_route(kind: Any, tell: Tell) -> dict[str, Any]:
    """It chooses the same output for a chunk when it is asked again."""
    times = 2  # at first: from then on the calls for a chunk have odd and even numbers, for one that counts in blocks

    def choose(self: Any, chunk: Chunk) -> Any:
        nonlocal times
        found = []
        for _ in range(times):
            with torch.random.fork_rng(devices=[]):
                found.append(kind.choose(self, chunk))
        times = 1
        again = kind.choose(self, chunk)
        if found.count(again) < len(found):
            tell(
                f"choose returned {found[0]} for the sample {chunk.lineages[0]}, and {again} when asked again: it must "
                "be a pure function of its chunk. To take turns return chunk.positions[0] % outputs"
            )
        return again

    return {"choose": choose}


def _of_regroup(kind: Any, tell: Tell) -> dict[str, Any]:
    """Without a state its groups are of consecutive whole chunks, each chunk in one of them."""
    came: deque[tuple[Any, tuple[Lineage, ...]]] = deque()  # chunks that are in no group yet
    end: Any = None

    def checked(self: Any, call: Callable[[], Iterable[Chunk]], given: list[Chunk]) -> list[Chunk]:
        nonlocal end
        try:
            made = list(call())
        except Exception:
            gone = {row for chunk in self.failing or given for row in chunk.lineages}
            kept = [entry for entry in came if not gone.issuperset(entry[1])]
            came.clear()
            came.extend(kept)
            raise
        for out in made:
            rows, left = set(out.lineages), []
            follows = earlier(out.before, out.after) and not earlier(out.before, end)
            end = out.after
            while came and earlier(came[0][0], out.after):
                left += [row for row in came.popleft()[1] if row not in rows]
            if left or not follows:
                tell(
                    f"the group of {sorted(rows)[:3]} is not of consecutive whole chunks, joined by pg.Chunk.group"
                    f"{f' (it leaves out {left[0]})' if left else ''}. An operator that carries a remainder over, or "
                    "leaves samples out, keeps what it holds in state_dict()"
                )
        return made

    def process(self: Any, chunk: Chunk) -> Any:
        came.append((chunk.before, tuple(chunk.lineages)))
        return checked(self, lambda: kind.process(self, chunk), [chunk])

    def flush(self: Any) -> Any:
        nonlocal end
        made = checked(self, lambda: kind.flush(self), [])
        came.clear()
        end = None
        return made

    return {"process": process, "flush": flush}


def _of_fan_in(kind: Any, tell: Tell, ordered: bool) -> dict[str, Any]:
    """Resumed at a cursor, a copy reads the same input next; each output is of what came since the one before."""
    ended: set[int] = set()
    came: set[Lineage] = set()
    last: Any = None  # what next_input() has to reproduce: the cursor, with numbers in place of the positions
    mine: Any = None  # not one of the copies that states are made with
    begun: Any = None
    before: Any = None

    def open(self: Any, context: Any) -> None:
        nonlocal mine
        mine = self
        kind.open(self, context)

    def begin(self: Any, inputs: int, epoch: int) -> None:
        nonlocal begun, before
        if self is mine:
            before = None
            ended.clear()
            came.clear()
            fresh = detached(self)
            fresh.__class__ = kind
            begun = fresh, inputs, epoch
        kind.begin(self, inputs, epoch)

    def end_input(self: Any, index: int) -> None:
        if self is mine:
            ended.add(index)
        kind.end_input(self, index)

    def process(self: Any, chunk: Chunk) -> Any:
        came.update(chunk.lineages)
        out = kind.process(self, chunk)
        if isinstance(out, Chunk):
            if not came.issuperset(out.lineages):
                tell(
                    "an output has samples that came before an earlier output: a resume after that would lose them"
                )
            came.clear()
        return out

    def cursor(self: Any, positions: Any) -> Any:
        nonlocal last, before
        found = kind.cursor(self, positions)
        if self is mine:
            if ordered and before is not None and not earlier(before, freeze(found)):
                tell(
                    "its cursors must grow from output to output: put the positions or a count of outputs first"
                )
            before = freeze(found)
            marks = [None if position is None else number for number, position in enumerate(positions, 1)]
            try:
                last = freeze(json.loads(json.dumps(kind.cursor(self, marks)))), marks
            except (TypeError, ValueError) as error:
                tell(f"cursor() must return a tuple of positions and other JSON values ({error})")
        return found

    def next_input(self: Any) -> int | None:
        nonlocal last
        index: int | None = kind.next_input(self)
        if self is not mine:
            return index
        fresh, inputs, epoch = begun
        if index is not None and (index in ended or not 0 <= index < inputs):
            raise AssertionError(
                f"next_input() returned input {index}, and inputs {sorted(ended)} of 0 to {inputs - 1} have ended"
            )
        if last is None:
            return index
        (at, marks), last = last, None
        resumed = detached(fresh)
        resumed.begin(inputs, epoch)
        if not isinstance(at, tuple) or list(resumed.cursors(at, inputs)) != marks:
            tell(
                f"cursors() does not return the positions {marks} that cursor() was given; the cursor was {at}"
            )
        elif freeze(json.loads(json.dumps(resumed.cursor(marks)))) != at:
            tell(f"cursors() does not restore what cursor() holds: {at}")
        else:
            following = resumed.next_input()
            while following is not None and following in ended:
                resumed.end_input(following)
                following = resumed.next_input()
            if following != index:
                tell(
                    f"resumed at the cursor {at}, it would next read input {following}, not {index}: return from "
                    "cursor() also what next_input() depends on, and restore it in cursors()"
                )
        return index

    methods = (open, begin, end_input, process, cursor, next_input)
    return {each.__name__: each for each in methods}
