"""The backends, each declared once: its name, and the facts that planner, engine, profile and tuner ask for.

Nothing compares a backend with a name: what differs between backends is a fact here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal

from pipegraph.errors import GraphError, shown


class StageBackend(str):
    """A backend, by its name.

    Attributes:
        in_consumer: it has no workers: the thread that takes its output does the work.
        in_trainer: the work is done in the trainer's process, and shares its GIL, memory, generators and devices.
        measurable: its workers are processes of this machine, whose CPU time and memory can be read.
        on_nodes: its workers may be on other machines, and see what these see.
        joins_late: workers start as there is room for them: a stage begins with its first.
        why_fixed: why the number of workers cannot change while a stage runs; "" if it can.
        call_cost: cost of a call to a worker, as a multiple of a hand-over between threads. The limit of look-ahead
            grows with it.
        bundle_ms: milliseconds of work that a call is worth. Long work drives the calls' own code and data from the
            caches of both sides: a call of 0.1 ms takes 1 ms then.
        bundle_bytes: bytes of a bundle that are worth a call.
        words: one worker and several, in messages.
        pool: ``module:class`` of what makes the hosts of its workers; "" if their operators run in the trainer.
    """

    in_consumer = False
    in_trainer = False
    measurable = False
    on_nodes = False
    joins_late = False
    why_fixed = ""
    call_cost = 1
    bundle_ms = 1
    bundle_bytes = 1 << 20
    words = ("worker", "workers")
    pool = ""

    def load_pool(self) -> Any:
        """The class named by ``pool``."""
        module, _, name = self.pool.partition(":")
        return getattr(import_module(module), name)


class _InlineBackend(StageBackend):
    in_consumer = in_trainer = True
    why_fixed = "an inline stage runs in its consumer"


class _ThreadBackend(StageBackend):
    in_trainer = True


class _ProcessBackend(StageBackend):
    measurable = True
    call_cost = 10
    bundle_ms = 40
    words = ("process", "processes")
    pool = "pipegraph.engine.process.processes:Processes"


class Ray(StageBackend):
    """``backend=pg.Ray(...)``: actors of the Ray cluster to which the program is connected; ``"ray"`` is ``pg.Ray()``.

    Args:
        resources: of each actor, such as ``{"num_cpus": 2, "memory": 4 << 30}``; other names are custom resources of
            the cluster. One CPU by default.
        runtime_env: the actors' environment, as in ``ray.init``.
    """

    resources: Mapping[str, float]
    runtime_env: Mapping[str, Any] | None

    on_nodes = True
    joins_late = True
    why_fixed = "actors come as the cluster has room for them"
    call_cost = bundle_ms = 50  # one or two milliseconds for all participants, as much as writing megabytes
    bundle_bytes = 8 << 20
    words = ("actor", "actors")
    pool = "pipegraph.engine.actors.cluster:Cluster"

    def __new__(
        cls, resources: Mapping[str, float] | None = None, runtime_env: Mapping[str, Any] | None = None
    ) -> Ray:
        self = super().__new__(cls, "ray")
        self.resources, self.runtime_env = dict(resources or {}), runtime_env
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.resources, self.runtime_env


INLINE, THREAD, PROCESS, RAY = (
    _InlineBackend("inline"),
    _ThreadBackend("thread"),
    _ProcessBackend("process"),
    Ray(),
)

BackendName = Literal["inline", "thread", "process", "ray"]

BACKENDS: dict[str, StageBackend] = {each: each for each in (INLINE, THREAD, PROCESS, RAY)}
"""All backends by name; pools are made in this order."""


def backend_of(name: str, stage: str) -> StageBackend:
    """A backend by its name, or as it was given; raises GraphError if there is none of this name."""
    if isinstance(name, StageBackend):
        return name
    found = BACKENDS.get(name) if isinstance(name, str) else None
    if found is None:
        raise GraphError(f"stage {stage!r}: backend must be one of {', '.join(BACKENDS)}, got {shown(name)}")
    return found
