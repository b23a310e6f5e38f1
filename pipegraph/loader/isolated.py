"""``loader(isolate=True)``: the host's part of a graph runs with a loader of its own in a child process.

To the trainer that loader is a source in a process, which gives its chunks and the state behind each. Below it run the
stages from the first that moves data to a device on. So a lost child, a close, Ctrl-C and a resume are what they are for
any source in a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import monotonic
from typing import Any

from pipegraph.backends import INLINE, PROCESS
from pipegraph.capabilities import Moves, Resumable
from pipegraph.chunk import Chunk
from pipegraph.contracts import Context, Fact, Operator, Source
from pipegraph.errors import GraphError
from pipegraph.graph import Graph, Node
from pipegraph.loader.loader import Loader
from pipegraph.loader.options import LoaderOptions
from pipegraph.profile import Profile
from pipegraph.stage_spec import Edge, StageSpec

PROFILE_S = 1.0
"""Seconds between two profiles that the child sends."""


class HostPart(Source, Resumable):
    """The chunks of a graph's node, from a loader that runs where this source is read."""

    name = "isolated"
    facts = Fact.SEEDS_ITSELF | Fact.TRUSTED | Fact.SPLITS_ITSELF | Fact.ONE_WORLD_SIZE
    reads_ahead = True

    def __init__(self, graph: Graph, output: str, options: LoaderOptions) -> None:
        self._graph, self._output, self._options = graph, output, options
        self._loader: Loader | None = None
        self._restored: Any = None
        self._next = -1  # the epoch that the loader goes on with by itself
        plan = graph.plan(output)
        self.gives = plan.stages[plan.output.stage].level

    def config(self) -> dict[str, Any]:
        return {"graph": self._graph.plan(self._output).digests()}

    def length(self, epoch: int, rank: int, world_size: int) -> int | None:
        plan = self._graph.plan(self._output)
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
            self._graph.seed = self._seed
            options = replace(self._options, rank=rank, world_size=world_size, mesh=None)
            self._loader = Loader(self._graph, self._output, options)
        loader, (step, state) = self._loader, self._restored or (0, None)
        self._restored = None
        if state is not None:
            loader.load_state_dict(state)
        elif epoch != self._next:
            loader.set_epoch(epoch + 1)
            loader.set_epoch(epoch)  # as a whole, also one that was begun
        self._next, told = -1, 0.0
        for step, chunk in enumerate(loader.chunks(), step):
            profile = None
            if monotonic() - told > PROFILE_S:
                profile, told = loader.profile(), monotonic()
            if step >= start:
                yield step * world_size + rank, (chunk, profile)
        self._next = epoch + 1


class Received(Operator):
    """Makes the child's chunk the trainer's."""

    name = "received"
    facts = Fact.SEEDS_ITSELF | Fact.TRUSTED

    def __init__(self) -> None:
        self.profiles: list[Profile] = []

    def process(self, chunk: Chunk) -> Chunk:
        made, profile = chunk.data
        if profile is not None:
            self.profiles[:] = [profile]
        # The same chunk, in its place in the stream, with what the child's says of its samples.
        chunk.data, chunk.lineages, chunk.keys = made.data, made.lineages, made.keys
        chunk.batched, chunk.spans, chunk.layout = made.batched, made.spans, made.layout
        return chunk


class IsolatedLoader(Loader):
    """The loader of a graph whose host's part is isolated; :meth:`profile` is of that part, as of a second ago."""

    def __init__(self, graph: Graph, output: Node | str | None, options: LoaderOptions) -> None:
        if options.autotune:
            raise GraphError("autotune=True sees the training loop, and isolate=True runs the stages elsewhere: one of both")
        graph.plan(output)  # raises what is wrong
        last = output.name if isinstance(output, Node) else output or graph.sinks()[0]
        below: list[StageSpec] = []
        walked = [spec := graph.stages[last]]
        while len(spec.upstream) == 1:
            walked.append(spec := graph.stages[spec.upstream[0].stage])
        for number, spec in enumerate(walked):
            if spec.operator.can(Moves) is not None:
                below = walked[: number + 1][::-1]
        cut = below[0].upstream[0] if below else Edge(last)
        inner = replace(options, epochs=options.epochs, equal_steps=False, log_every=None)
        outer = Graph(graph.name, graph.seed)
        host = outer.add(HostPart(graph, cut.stage, inner), name="isolated", backend=PROCESS, capacity=2)
        received = Received()
        outer.add(received, host, name="received", backend=INLINE, capacity=1)
        self._profiles = received.profiles
        above = "received"
        for spec in below:
            outer.stages[spec.name] = replace(spec, upstream=(Edge(above),))
            above = spec.name
        super().__init__(outer, above, options)

    def profile(self, since: Profile | None = None) -> Profile:
        if since is not None or not self._profiles:
            return super().profile(since)
        return self._profiles[-1]
