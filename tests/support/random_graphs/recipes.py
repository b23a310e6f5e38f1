"""Random graphs as values, buildable in different placements (needs hypothesis).

A :class:`Recipe` is drawn once; :meth:`Recipe.build` makes its graph inline (the reference) or as drawn. All its
functions are pure functions of their item, so that only the engine can make a difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hypothesis import strategies as st

from pipegraph import operators as ops
from pipegraph.backends import BackendName
from pipegraph.contracts import Operator, Source
from pipegraph.graph import Graph, Node
from pipegraph.order import StridedOrder
from pipegraph.stage_spec import Policy, Retry, Skip
from random_graphs.own_operators import ROUTES, Backwards, Counted, InSequence, InTurn, Shuffled
from random_graphs.stage_functions import (
    Flaky,
    Rough,
    RunningSum,
    Stream,
    choose,
    document,
    draw,
    drawn_from,
    fail,
    fraction,
    items_of,
    keep,
    later,
    sampled_from,
    several,
    transform,
)

MAX_STAGES = 12
SPLITS = ("route", "own-route")
OWN_SOURCES = ("own-sequence", "own-backwards", "own-shuffled")
SIZES = (0, 1, 5, 9, 14, 20, 30, 45)


@dataclass(frozen=True)
class Step:
    """One stage of a recipe; ``ups`` are numbers of steps, with an output for a step that is a route."""

    kind: str
    ups: tuple[tuple[int, int], ...] = ()
    size: int = 1
    delay: int = 0
    workers: int = 1
    capacity: int = 1
    backend: BackendName = "thread"
    ordered: bool = True
    policy: Policy = "raise"
    wide: bool = False


@dataclass(frozen=True)
class Recipe:
    """A graph to be built; ``ordered`` says whether its outcome is fixed chunk by chunk."""

    steps: tuple[Step, ...]
    seed: int = 0
    ordered: bool = True
    fails: bool = field(default=False, compare=False)

    @property
    def output(self) -> str:
        """The stage to deliver from: the last."""
        return f"{len(self.steps) - 1}-{self.steps[-1].kind}"

    def streamed(self) -> Recipe:
        """The same with sources whose iterables have states."""
        return replace(
            self,
            steps=tuple(
                replace(each, kind="stream") if each.kind == "iterable" else each for each in self.steps
            ),
        )

    def drawing(self) -> Recipe:
        """The same with sources whose samplers draw from generators, which go on from epoch to epoch."""
        drawn = ("iterable", "sequence", "sampled", "keyed")
        return replace(
            self,
            steps=tuple(replace(each, kind="drawn") if each.kind in drawn else each for each in self.steps),
        )

    def without_budgets(self) -> Recipe:
        """The same without error budgets: they count from the last start, so they would end a resumed pass later."""

        def freed(policy: Policy) -> Policy:
            if isinstance(policy, Skip):
                return Skip()
            return replace(policy, then=freed(policy.then)) if isinstance(policy, Retry) else policy

        return replace(self, steps=tuple(replace(each, policy=freed(each.policy)) for each in self.steps))

    def build(self, inline: bool = False, turn: int = 0) -> Graph:
        """The graph, inline or placed as drawn; ``turn`` varies the placement."""
        graph = Graph("fuzz", seed=self.seed)
        nodes: list[Node] = []
        for number, step in enumerate(self.steps):
            ups = [
                nodes[up][output] if self.steps[up].kind in SPLITS else nodes[up] for up, output in step.ups
            ]
            backends: tuple[BackendName, ...] = ("thread", "thread", "inline")
            nodes.append(
                graph.add(
                    _operator(step),
                    *ups,
                    name=f"{number}-{step.kind}",
                    workers=1 if inline else 1 + (step.workers + turn - 1) % 4,
                    capacity=64
                    if inline
                    else (1 + (step.capacity + 3 * turn - 1) % 8) * (8 if step.wide else 1),
                    backend="inline"
                    if inline
                    else step.backend
                    if turn == 0 or step.wide
                    else backends[(number + turn) % 3],
                    ordered=step.ordered,
                    on_error=step.policy,
                )
            )
        return graph


def _operator(step: Step) -> Operator | Source:
    size, delay = step.size, step.delay
    made: dict[str, Any] = {
        "iterable": lambda: ops.FromIterable(items_of("ints", size)),
        "stream": lambda: ops.FromIterable(Stream(size)),
        "drawn": lambda: drawn_from(max(1, size), bool(delay % 2)),
        "arrays": lambda: ops.FromSequence([{"x": each["x"]} for each in items_of("arrays", size)]),
        "keyed": lambda: ops.FromSequence(items_of("keyed", size)),
        "sampled": lambda: sampled_from(size, bool(delay % 2)),
        "rough": lambda: ops.FromSequence(Rough(size, 4 + delay % 3, bool(delay % 2))),
        "sequence": lambda: ops.FromSequence(items_of("ints", size), order=StridedOrder(shuffle=True)),
        "map": lambda: ops.Map(partial(transform, factor=size, delay=delay)),
        "async": lambda: ops.Map(partial(later, factor=size, delay=delay)),
        "random": lambda: ops.Map(partial(draw, delay=delay)),
        "filter": lambda: ops.Filter(partial(keep, modulus=size + 1)),
        "flat": lambda: ops.FlatMap(partial(several, limit=min(size, 3))),
        "fail": lambda: ops.Map(partial(fail, modulus=size + 3)),
        "flaky": lambda: ops.Map(Flaky(size + 2)),
        "sum": RunningSum,
        "batch": lambda: ops.Batch(size, collate=list, drop_last=bool(delay % 2)),
        "batch-all": lambda: ops.Batch(size, collate=list),
        "stack": lambda: ops.Batch(3 * size, drop_last=bool(delay % 2)),
        "unbatch": ops.Unbatch,
        "shuffle": lambda: ops.Shuffle(size),
        "bucket": lambda: (
            ops.Bucket(partial(choose, outputs=5), [1, 3], cost=fraction, limit=0.7 + 0.1 * size)
            if delay % 2
            else ops.Bucket(partial(choose, outputs=5), [1, 3], size=size)
        ),
        "document": lambda: ops.Map(partial(document, most=3 * size)),
        "pack": lambda: ops.Pack(size, "fit" if delay % 2 else "split", window=1 + delay % 5),
        "zip": ops.Zip,
        "concat": ops.Concat,
        "mix": lambda: ops.Mix([1.0 + i for i in range(len(step.ups))]),
        "take": lambda: ops.Take(5 * size),
        "mix-all": lambda: ops.Mix([1.0 + i for i in range(len(step.ups))], stop="all"),
        "route": lambda: ops.Route(partial(choose, outputs=1 + size % 3), 1 + size % 3),
        "own-route": lambda: ROUTES[size % len(ROUTES)](1 + size % 3),
        "own-sequence": lambda: InSequence(size),
        "own-backwards": lambda: Backwards(size),
        "own-shuffled": lambda: Shuffled(size),
        "in-turn": lambda: InTurn(1 + size % 4),
        "counted": lambda: Counted(1 + size % 4),
        "merge": ops.Merge,
    }
    operator: Operator | Source = made[step.kind]()
    return operator


class _Sketch:
    """A recipe while it is drawn: the steps, and what is known of each."""

    def __init__(self, draw_from: Any, failures: bool) -> None:
        self.draw = draw_from
        self.failures = failures
        self.steps: list[Step] = []
        self.level: list[str] = []
        self.unordered: list[bool] = []
        self.joined: list[bool] = []  # below a fan-in of such: one stage may read it

    def add(self, kind: str, *ups: tuple[int, int], level: str = "", wide: bool = False) -> int:
        """Draw a step of this kind; ``wide`` is ordered and has a long queue. Returns its number."""
        unordered = any(self.unordered[up] for up, _ in ups)
        parallel = kind in (
            "map",
            "async",
            "random",
            "filter",
            "flat",
            "fail",
            "flaky",
            "arrays",
            "keyed",
            "sampled",
            "rough",
            "sequence",
            "unbatch",
            "document",
            "own-backwards",
            "own-shuffled",
        )
        policy: Policy = "raise"
        if kind in ("fail", "rough"):
            exact = [Skip(2), Retry(1, then=Skip(3)), Skip(0.2)] if not unordered else []
            policy = (
                self.draw(st.sampled_from(["raise", "raise", Skip(), *exact])) if self.failures else Skip()
            )
        elif kind == "flaky":
            policy = Retry(2)
        ordered = wide or not parallel or self.draw(st.integers(0, 7)) > 0
        if not ordered and isinstance(policy, Skip | Retry) and kind in ("fail", "rough"):
            policy = Skip()
        self.steps.append(
            Step(
                kind,
                ups,
                self.draw(st.sampled_from(SIZES) if not ups else st.integers(1, 7)),
                self.draw(st.sampled_from([0, 0, 1, 60, 400])),
                self.draw(st.integers(1, 4)),
                self.draw(st.integers(1, 8)),
                self.draw(st.sampled_from(["thread", "thread", "thread", "inline"])),
                ordered,
                policy,
                wide,
            )
        )
        self.level.append(level or (self.level[ups[0][0]] if ups else "sample"))
        self.unordered.append(unordered or not ordered)
        self.joined.append((unordered and len(ups) > 1) or any(self.joined[up] for up, _ in ups))
        return len(self.steps) - 1

    def rows(self) -> int:
        """A source, one-to-one stages and a batch: where rows are handed over in bundles."""
        last = self.add(
            self.draw(st.sampled_from(["iterable", "sequence", "rough", "keyed", "sampled"])), wide=True
        )
        for _ in range(self.draw(st.integers(0, 2))):
            kind = self.draw(st.sampled_from(["map", "random", "fail", "flaky", "async"]))
            last = self.add(kind, (last, 0), wide=True)
        return self.add(
            self.draw(st.sampled_from(["batch", "stack", "stack"])), (last, 0), level="batch", wide=True
        )

    def one_input(self, up: tuple[int, int]) -> int:
        """A drawn stage behind ``up``."""
        level, unordered = self.level[up[0]], self.unordered[up[0]]
        kinds = ["map", "map", "async", "random", "shuffle"]
        if level == "sample":
            kinds += ["filter", "flat", "fail", "fail", "flaky", "batch-all"]
            kinds += [] if unordered else ["batch", "bucket", "sum", "pack", "take"]
        else:
            kinds += ["unbatch", "unbatch"]
            kinds = [k for k in kinds if k not in ("map", "async", "random")] if unordered else kinds
        kind = self.draw(st.sampled_from(kinds))
        if kind == "pack":
            up = (self.add("document", up), 0)
            if self.unordered[up[0]]:
                return up[0]
        changes = {"batch": "batch", "batch-all": "batch", "unbatch": "sample", "flat": "sample"}
        return self.add(kind, up, level=changes.get(kind, ""))

    def several_inputs(self) -> int:
        """A drawn fan-in over stages there are."""
        last = len(self.steps) - 1
        others = st.integers(0, last)
        count = self.draw(st.integers(1, 2))
        drawn = [self.draw(others) for _ in range(count)]
        ups = [(last, 0), *((up, 0) for up in drawn if not self.joined[up])]
        ups = [
            (up, 0)
            for up, _ in ups
            if self.level[up] == self.level[last] and self.steps[up].kind not in SPLITS
        ]
        if self.draw(st.booleans()):
            ups.reverse()
        kinds = ["concat", "merge", "mix-all", "in-turn", "counted"]
        if not any(self.unordered[up] for up, _ in ups):
            kinds.append("mix")
            if self.level[last] == "sample":  # zipped batches of different sizes cannot be taken apart again
                kinds += ["zip", "zip"]
        return self.add(self.draw(st.sampled_from(kinds)), *ups)

    def routed(self) -> int:
        """A route, something in its branches, and the merge."""
        route = self.add(self.draw(st.sampled_from(SPLITS)), (len(self.steps) - 1, 0))
        # Which output a batch takes depends on the samples in it: below completion order these may be others each
        # time, so what a branch does to a sample must not differ from what the others do.
        most = 0 if self.unordered[route] and self.level[route] == "batch" else 2
        ends = []
        for output in range(1 + self.steps[route].size % 3):
            end = (route, output)
            for _ in range(self.draw(st.integers(0, most))):
                if self.level[end[0]] == "batch" and self.level[route] == "sample":
                    end = (self.add("unbatch", end, level="sample"), 0)
                else:
                    end = (self.one_input(end), 0)
            if self.level[end[0]] == "batch" and self.level[route] == "sample":
                end = (self.add("unbatch", end, level="sample"), 0)
            elif self.level[end[0]] == "sample" and self.level[route] == "batch":
                end = (self.add("batch-all", end, level="batch"), 0)
            ends.append(end)
        return self.add("merge", *ends)


@st.composite
def row_recipes(draw_from: Any) -> Recipe:
    """Graphs in which rows are handed over in bundles: a source, one-to-one stages, a batch, perhaps more."""
    sketch = _Sketch(draw_from, failures=True)
    sketch.rows()
    if draw_from(st.booleans()):
        sketch.one_input((len(sketch.steps) - 1, 0))
    steps = [replace(step, backend="thread") for step in sketch.steps]
    return Recipe(
        tuple(steps),
        draw_from(st.integers(0, 3)),
        not any(sketch.unordered),
        any(step.kind in ("fail", "rough") and step.policy != Skip() for step in steps),
    )


@st.composite
def recipes(draw_from: Any, failures: bool = True) -> Recipe:
    """Graphs of up to 12 stages with fan-out, fan-in, routes; without ``failures`` none reaches the consumer."""
    sketch = _Sketch(draw_from, failures)
    for _ in range(draw_from(st.integers(1, 2))):
        if draw_from(st.integers(0, 3)) == 0:
            sketch.rows()
        else:
            sketch.add(
                draw_from(
                    st.sampled_from(["iterable", "sequence", "arrays", "keyed", "sampled", *OWN_SOURCES])
                )
            )
    for _ in range(draw_from(st.integers(0, MAX_STAGES - 3))):
        if len(sketch.steps) >= MAX_STAGES - 1:
            break
        what = draw_from(st.integers(0, 9))
        if what < 6:
            sketch.one_input((len(sketch.steps) - 1, 0))
        elif what < 9 or len(sketch.steps) > MAX_STAGES - 9 or sketch.joined[-1]:
            sketch.several_inputs()
        else:
            sketch.routed()
    return Recipe(
        tuple(sketch.steps),
        draw_from(st.integers(0, 3)),
        not any(sketch.unordered),
        any(step.kind in ("fail", "rough") and step.policy != Skip() for step in sketch.steps),
    )
