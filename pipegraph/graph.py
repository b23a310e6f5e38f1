"""The description of a pipeline: stages and edges. Nothing runs here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from pipegraph.backends import BackendName, Ray, backend_of
from pipegraph.contracts import Component, FanIn, Operator, Source
from pipegraph.errors import GraphError, shown
from pipegraph.integers import flag, integer
from pipegraph.parameters import plain_parameters
from pipegraph.stage_spec import RESERVED, Edge, Policy, StageSpec
from pipegraph.units import parse_bytes

if TYPE_CHECKING:
    from pipegraph.loader.loader import Loader
    from pipegraph.planning.plan import Plan


class Node:
    """A stage in a graph. Add stages after it with ``node.then(...)`` or ``graph.add(..., node)``."""

    __slots__ = ("_edge", "graph")

    def __init__(self, graph: Graph, edge: Edge) -> None:
        self.graph = graph
        self._edge = edge

    @property
    def name(self) -> str:
        """The stage's name."""
        return self._edge.stage

    @property
    def operator(self) -> Operator | Source:
        """What the stage does."""
        return self._spec.operator

    @property
    def _spec(self) -> StageSpec:
        return self.graph.stages[self.name]

    def then(
        self,
        operator: Operator | Callable[..., Any],
        *,
        name: str | None = None,
        workers: int | Literal["auto"] = 1,
        backend: BackendName | Ray | None = None,
        capacity: int | Literal["auto"] | None = None,
        max_bytes: int | str | None = None,
        ordered: bool = True,
        on_error: Policy = "raise",
        timeout: float | None = None,
    ) -> Node:
        """``graph.add(operator, self, ...)``; see :meth:`Graph.add` for the options and what it raises."""
        return self.graph.add(
            operator,
            self,
            name=name,
            workers=workers,
            backend=backend,
            capacity=capacity,
            max_bytes=max_bytes,
            ordered=ordered,
            on_error=on_error,
            timeout=timeout,
        )

    def __getitem__(self, output: int) -> Node:
        """Output ``output`` of a ``Route``."""
        outputs = self._spec.outputs
        if not outputs:
            raise GraphError(
                f"stage {self.name!r}: only a Route has several outputs, {self.name!r} is a {self.operator.name}"
            )
        if not 0 <= output < outputs:
            raise IndexError(f"stage {self.name!r}: outputs are 0..{outputs - 1}, got {output}")
        return Node(self.graph, Edge(self.name, output))

    def __iter__(self) -> Iterator[Node]:
        return map(self.__getitem__, range(self._spec.outputs))

    def __repr__(self) -> str:
        output = f"[{self._edge.output}]" if self._spec.outputs else ""
        return f"<Node {self.name}{output}>"


class Graph:
    """A DAG of stages.

    Args:
        name: shown in plans, profiles and errors.
        seed: the seed of all random numbers in the pipeline; with None, rank 0 chooses one at the first pass.

    Raises:
        GraphError: ``seed`` is not an int in 0..2**64-1.

    Examples:
        >>> from pipegraph import operators as ops
        >>> graph = Graph("squares")
        >>> numbers = graph.add(ops.FromIterable(range(3)))
        >>> squares = numbers.then(lambda x: x * x, name="square")
        >>> list(graph.loader())
        [0, 1, 4]
    """

    def __init__(self, name: str = "pipeline", seed: int | None = 0) -> None:
        if seed is not None:
            rule = "must be an int in 0..2**64-1 or None"
            seed = integer(seed, f"graph {name!r}: seed", 0, rule)
            if seed >= 1 << 64:
                raise GraphError(f"graph {name!r}: seed {rule}, got {seed}")
        self.name = name
        self.seed = seed
        self.stages: dict[str, StageSpec] = {}

    def add(
        self,
        operator: Operator | Source | Callable[..., Any],
        *upstream: Node,
        name: str | None = None,
        workers: int | Literal["auto"] = 1,
        backend: BackendName | Ray | None = None,
        capacity: int | Literal["auto"] | None = None,
        max_bytes: int | str | None = None,
        ordered: bool = True,
        on_error: Policy = "raise",
        timeout: float | None = None,
    ) -> Node:
        """Add a stage after its upstream nodes.

        Args:
            operator: a source, an operator, or a plain (also ``async``) function of one item.
            upstream: no node for a source, one for most operators, several for a fan-in.
            name: unique in the graph; by default the operator's name.
            workers: number of workers. ``"auto"`` begins with one, and the tuner changes the number while passes run
                (``docs/profiling.md``).
            backend: ``"thread"``; ``"inline"``; ``"process"`` for functions that hold the GIL (Linux only; see
                ``docs/processes.md``); or ``"ray"`` or ``pg.Ray(resources, runtime_env)``, which runs the workers as
                actors on other machines (``docs/ray.md``). By default threads; processes where the operator is known
                to be slower in so many threads (``DecodeImage`` with more than 4 workers): the plan says so.
            capacity: maximum number of items in the output queue; by default 64 samples, or 2 batches per worker
                (1,024 and 8 behind a source and behind ``Batch``, while they take less than 2 MB).
                ``"auto"`` begins with that, and the tuner changes it.
            max_bytes: maximum number of bytes in the output queue; by default a share of ``memory_limit``.
            ordered: whether chunks leave in the order in which they arrived.
            on_error: ``"raise"``, ``pg.Skip(budget)`` or ``pg.Retry(times, backoff, then)``.
            timeout: seconds that one item may take; after that it fails with ``StageTimeoutError``, and its
                process or actor is ended and replaced. Needs ``"process"`` or ``"ray"``: nothing can end a thread.

        Raises:
            GraphError: an option or the wiring is wrong; the message names the rule, the value and the remedy.
        """
        if not isinstance(operator, Operator | Source):
            operator = self._as_operator(operator)
        name = self._free_name(operator.name) if name is None else self._check_name(name)
        self._check_arity(name, operator, upstream)
        tuned = tuple(
            what for what, given in (("workers", workers), ("capacity", capacity)) if given == "auto"
        )
        workers = 1 if workers == "auto" else workers
        capacity = None if capacity == "auto" else capacity
        if max_bytes is not None:
            max_bytes = parse_bytes(max_bytes, f"stage {name!r}: max_bytes")
        edges = tuple(node._edge for node in upstream)
        said = type(operator).config is not Component.config
        self.stages[name] = StageSpec(
            name,
            operator,
            edges,
            workers,
            None if backend is None else backend_of(backend, name),
            capacity,
            max_bytes,
            ordered,
            on_error,
            timeout,
            None if said else plain_parameters(operator),
            tuned,
        )
        return Node(self, Edge(name))

    def _as_operator(self, function: Any) -> Operator:
        if inspect.isclass(function) and issubclass(function, Operator | Source):
            raise GraphError(f"got the class {function.__name__}: pass an instance, {function.__name__}(...)")
        if not callable(function):
            source = "; to read data, use ops.FromSequence(data) or ops.FromIterable(data)"
            remedy = source if isinstance(function, Iterable) else ""
            raise GraphError(f"expected an operator, a source or a function, got {shown(function)}{remedy}")
        from pipegraph.operators import Map

        return Map(function)

    def _free_name(self, stem: str) -> str:
        name, number = stem, 2
        while name in self.stages or name in RESERVED:
            name, number = f"{stem}-{number}", number + 1
        return name

    def _check_name(self, name: str) -> str:
        if not isinstance(name, str) or not name:
            raise GraphError(f"a stage's name must be a non-empty string, got {shown(name)}")
        if name in RESERVED:
            raise GraphError(
                f"a stage cannot be named {name!r}: profiles and states use this name; choose another name="
            )
        if name in self.stages:
            raise GraphError(
                f"stage {name!r}: the graph already has a stage of this name; choose another name="
            )
        return name

    def _check_arity(self, name: str, operator: Operator | Source, upstream: tuple[Node, ...]) -> None:
        for node in upstream:
            if not isinstance(node, Node):
                raise GraphError(f"stage {name!r}: upstream must be nodes of this graph, got {shown(node)}")
            if node.graph is not self:
                raise GraphError(
                    f"stage {name!r}: upstream node {node.name!r} belongs to graph {node.graph.name!r}"
                )
        count = len(upstream)
        inputs = operator.inputs if isinstance(operator, FanIn) else 1
        if isinstance(operator, Source):
            if count:
                raise GraphError(f"stage {name!r}: a source takes no upstream node, got {count}")
        elif inputs == "many":
            if not count:
                raise GraphError(
                    f"stage {name!r}: {operator.name} takes at least one upstream node, got none"
                )
        elif count != inputs:
            wanted = "one upstream node" if inputs == 1 else f"{inputs} upstream nodes"
            remedy = (
                "join several with Zip(), Concat(), Mix(weights) or Merge() first"
                if count
                else "a pipeline begins with a source such as ops.FromSequence(dataset); add this with source.then()"
            )
            raise GraphError(f"stage {name!r}: {operator.name} takes exactly {wanted}, got {count}; {remedy}")

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"graph {self.name!r} only describes a pipeline: iterate its loader instead, "
            "with graph.loader() as loader: for batch in loader: ..."
        )

    def __getitem__(self, name: str) -> Node:
        """The node of a stage, to add others after it.

        Raises:
            KeyError: the graph has no stage of that name.
        """
        if name not in self.stages:
            raise KeyError(
                f"graph {self.name!r} has no stage {name!r}; it has: {', '.join(self.stages) or 'none'}"
            )
        return Node(self, Edge(name))

    def resize(self, settings: Mapping[str, Mapping[str, int]]) -> None:
        """Set the workers and capacities of stages, for example to ``loader.tuning().settings``.

        These stages are no longer tuned.

        Args:
            settings: stage -> ``{"workers": n, "capacity": n}``; either may be left out.

        Raises:
            GraphError: there is no such stage, or something else is to be set.
        """
        stages = dict(self.stages)
        for name, given in settings.items():
            if name not in stages:
                raise GraphError(
                    f"resize: graph {self.name!r} has no stage {name!r}; it has: {', '.join(stages)}"
                )
            if not set(given) <= {"workers", "capacity"}:
                raise GraphError(
                    f"resize: stage {name!r}: only 'workers' and 'capacity' can be set, got {given}"
                )
            old = stages[name]
            workers, capacity = given.get("workers", old.workers), given.get("capacity", old.capacity)
            stages[name] = replace(old, workers=workers, capacity=capacity, tuned=())
        self.stages = stages

    def sinks(self) -> list[str]:
        """Stages that feed no other, in the order they were added."""
        fed = {edge.stage for spec in self.stages.values() for edge in spec.upstream}
        return [name for name in self.stages if name not in fed]

    def plan(self, output: Node | str | None = None) -> Plan:
        """Check the graph and decide sizes, placement and rewrites. Nothing runs; print the plan to see it.

        Raises:
            GraphError: the graph cannot run; the message says why and what would help.
        """
        from pipegraph.engine.kinds import kind_of
        from pipegraph.planning.planner import make_plan

        return make_plan(self, output, kind_of)

    def loader(
        self,
        output: Node | str | None = None,
        *,
        epochs: int | None = 1,
        memory_limit: int | str | None = None,
        equal_steps: bool | None = None,
        autotune: bool = False,
        isolate: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Any = None,
        log_every: float | None = None,
    ) -> Loader:
        """The loader, which runs the pipeline when you iterate it. Nothing starts before the first ``iter()``.

        Args:
            output: the node whose chunks are delivered; needed only if the graph has several sinks.
            epochs: how far the loader may read ahead: into epoch ``epochs - 1`` at most; None is without end. With 1 it
                stops reading at the end of each epoch and begins the next one with its pass. It bounds nothing else.
            memory_limit: maximum bytes that wait between stages (an int, or a text such as ``"4 GB"``); by default half
                of the available memory.
            equal_steps: with True, all ranks end at the same step; they agree on it over ``torch.distributed``. With
                False, ranks may have different numbers of steps. Set one of the two if there are several ranks and
                the lengths are unknown.
            autotune: find the workers and capacities of all stages during training, starting from those of the graph;
                :meth:`Loader.tuning` shows the result.
            isolate: run all stages above the first ``Pin`` or copy to a device in a process of its own, so that their
                Python code does not wait for the training loop's, nor it for theirs (``docs/processes.md``).
            rank, world_size: by default those of torch.distributed, else of the environment, else 0 and 1.
            mesh: a DeviceMesh dimension that gives rank and world size.
            log_every: log a line with rate, waits and bottleneck after so many seconds each, as a batch is asked for,
                through the logger ``"pipegraph"`` at level INFO.

        Raises:
            GraphError: as :meth:`plan`, or an option is wrong.
        """
        from pipegraph.loader.loader import Loader, LoaderOptions

        options = LoaderOptions(
            epochs, memory_limit, equal_steps, autotune, rank, world_size, mesh, log_every
        )
        if flag(isolate, "isolate"):
            from pipegraph.loader.isolated import IsolatedLoader

            return IsolatedLoader(self, output, options)
        return Loader(self, output, options)

    def __str__(self) -> str:
        lines = [f"graph {self.name!r}, seed {self.seed}, {len(self.stages)} stages"]
        width = max(map(len, self.stages), default=0)
        for name, spec in self.stages.items():
            sources = ", ".join(
                f"{edge.stage}[{edge.output}]" if self.stages[edge.stage].outputs else edge.stage
                for edge in spec.upstream
            )
            behind = f"  <- {sources}" if sources else ""
            lines.append(f"  {name:<{width}}  {type(spec.operator).__name__}{behind}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"<Graph {self.name}: {' -> '.join(self.stages) if len(self.stages) < 8 else len(self.stages)}>"
        )
