"""``loader(isolate=True)``: the host's part of a graph runs with a loader of its own in a child process.

To the trainer that loader is a source in a process: its items are the loader's chunks, and its state is the loader's.
Below it run the stages from the first that moves data to a device on. So a lost child, a close, Ctrl-C and a resume are
what they are for any such source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pipegraph import concurrency
from pipegraph.chunk import Chunk
from pipegraph.components import Traits
from pipegraph.contracts import Context, Operator, Source
from pipegraph.engine.stage.ledger import Quarantined
from pipegraph.errors import GraphError
from pipegraph.graph import Graph, Node
from pipegraph.loader.digests import digests
from pipegraph.loader.loader import Loader
from pipegraph.loader.options import LoaderOptions
from pipegraph.measurements import Measured
from pipegraph.planning.plan import Plan
from pipegraph.stage_spec import Edge, StageSpec

COUNTED_S = 1.0
"""Seconds after which the child sends what it has counted again."""


class HostPart(Source):
    """The chunks of a graph's node, from a loader that runs where this source is read."""

    name = "isolated"
    reads_ahead = True

    def __init__(self, output: Node, options: LoaderOptions) -> None:
        self._output, self._options = output, options
        self._loader: Loader | None = None
        self._restored: Any = None
        self._next = -1  # the epoch that the loader goes on with by itself
        plan = self._plan()
        self.gives = plan.stages[plan.output.stage].level

    def _plan(self) -> Plan:
        return self._output.graph.plan(self._output)

    @property
    def traits(self) -> Traits:
        sources = [stage.source.traits for stage in self._plan().running if stage.source is not None]
        return Traits(
            seeds_itself=True,
            trusted=True,
            resumable=True,
            one_world_size=True,
            splits_itself=True,
            sees=lambda: "; ".join(filter(None, (each.sees() for each in sources))),
            deals_by=lambda: ", ".join(filter(None, (each.deals_by() for each in sources))),
        )

    def config(self) -> dict[str, Any]:
        return {"graph": digests(self._plan())}

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        plan = self._plan()
        return plan.steps(epoch, rank, world_size, plan.seed, ())

    def open(self, context: Context) -> None:
        """Begins nothing: it is opened in the trainer too."""
        self._seed = context.seed

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def begin_run(self, epoch: int, history: Any) -> None:
        super().begin_run(epoch, history)
        self._restored = None

    def restore(self, step: int, snapshot: Any) -> None:
        self._restored = step, snapshot

    def snapshot(self) -> Any:
        return None if self._loader is None else self._loader.state_dict()

    def iterate(self, epoch: int, rank: int, world_size: int, start: int) -> Iterator[Any]:
        if self._loader is None:
            self._output.graph.seed = self._seed
            options = replace(self._options, rank=rank, world_size=world_size, mesh=None)
            self._loader = Loader(self._output.graph, self._output, options)
        loader, (first, state) = self._loader, self._restored or (0, None)
        self._restored = None
        if state is not None:
            loader.load_state_dict(state)
        elif epoch != self._next:
            loader.set_epoch(epoch + 1)
            loader.set_epoch(epoch)  # as a whole, also one that was begun
        self._next, told = -1, 0.0
        for step, chunk in enumerate(loader.chunks(), first):
            counted = None
            if concurrency.monotonic() - told > COUNTED_S:
                counted, told = loader._counted()[1:], concurrency.monotonic()
            if step >= start:
                yield step * world_size + rank, (chunk, counted)
        self._next = epoch + 1


class Received(Operator):
    """Makes the child's chunk the trainer's."""

    name = "received"
    traits = Traits(seeds_itself=True, trusted=True)

    def __init__(self) -> None:
        self.counted: list[Any] = []

    def process(self, chunk: Chunk) -> Chunk:
        made, counted = chunk.data
        if counted is not None:
            self.counted[:] = [counted]
        # The same chunk, in its place in the stream, with what the child's says of its samples.
        chunk.data, chunk.lineages, chunk.keys = made.data, made.lineages, made.keys
        chunk.batched, chunk.spans, chunk.layout = made.batched, made.spans, made.layout
        return chunk


class IsolatedLoader(Loader):
    """The loader of a graph whose host's part is isolated, which its profile is of, as of a second ago."""

    def __init__(self, graph: Graph, output: Node | str | None, options: LoaderOptions) -> None:
        if options.autotune:
            raise GraphError(
                "autotune=True watches the training loop, which isolate=True keeps away: give one"
            )
        graph.plan(output)  # raises what is wrong
        cut = output._edge if isinstance(output, Node) else Edge(output or graph.sinks()[0])
        below: list[StageSpec] = []
        walked = [spec := graph.stages[cut.stage]]
        while len(spec.upstream) == 1:
            walked.append(spec := graph.stages[spec.upstream[0].stage])
        for number, spec in enumerate(walked):
            if spec.operator.traits.moves:
                below, (cut,) = walked[: number + 1][::-1], spec.upstream
        self._host_plan = graph.plan(Node(graph, cut))
        if any(stage.operator.traits.moves for stage in self._host_plan.running):
            raise GraphError(
                "isolate=True: stages that move data to a device must follow all fan-ins, in the trainer"
            )
        inner = replace(options, equal_steps=False, log_every=None)
        outer = Graph(graph.name, graph.seed)
        host = outer.add(HostPart(Node(graph, cut), inner), name="isolated", backend="process", capacity=2)
        received = Received()
        outer.add(received, host, name="received", backend="inline", capacity=1)
        self._received = received
        above = "received"
        for spec in below:
            outer.stages[spec.name] = replace(spec, upstream=(Edge(above),))
            above = spec.name
        super().__init__(outer, above, options)

    def _counted(self) -> tuple[Plan, Measured, Sequence[Quarantined], int]:
        measured, lost, count = self._received.counted[-1] if self._received.counted else (Measured(), (), 0)
        return self._host_plan, replace(measured, identity=self._received), lost, count
