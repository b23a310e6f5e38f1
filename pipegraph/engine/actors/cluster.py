"""The Ray actors of one loader: their options, and the operators that are sent to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipegraph.backends import Ray
from pipegraph.contracts import Context, Operator, Source
from pipegraph.engine.process.sealed import cannot_be_sent
from pipegraph.engine.remote.host import Host
from pipegraph.engine.remote.pool import Pool
from pipegraph.errors import GraphError, WorkerDiedError, extra_module
from pipegraph.planning.plan import Plan, StagePlan

NAMED = ("num_cpus", "num_gpus", "memory")
"""Resources for which Ray has separate options."""


class Cluster(Pool[object]):
    """Actors on the Ray cluster to which this process is connected.

    Args:
        fail: called with the error if ``ray.shutdown()`` ends the connection.

    Raises:
        MissingExtraError: Ray is not installed.
        GraphError: the process is not connected, or through Ray Client; a stage needs what no node has.
    """

    def __init__(self, plan: Plan, fail: Callable[[WorkerDiedError], None]) -> None:
        super().__init__(plan)
        ray = extra_module("ray", "ray", "backend='ray'")
        if not ray.is_initialized():
            raise GraphError(
                "backend='ray' runs on the Ray cluster that this process is connected to, and it is to none: call "
                "ray.init(address='auto') first (or ray.init() for one on this machine alone)"
            )
        if ray.util.client.ray.is_connected():
            raise GraphError(
                "backend='ray' needs the trainer on a node of the cluster: through Ray Client (ray://) every batch "
                "would cross a proxy. Submit the trainer as a job, or start it on a node"
            )
        from pipegraph.engine.actors.actor_host import Connection

        stages = [stage for stage in plan.running if stage.backend.on_nodes]
        later = ray._private.state.state.get_max_resources_from_cluster_config()  # of nodes that may be added
        there = {*NAMED}.union(later or (), *(node["Resources"] for node in ray.nodes() if node["Alive"]))
        for stage in stages:
            assert isinstance(stage.backend, Ray)
            if missing := stage.backend.resources.keys() - there:
                raise GraphError(
                    f"stage {stage.name!r}: no node of the Ray cluster has resources={sorted(missing)}, so that no "
                    f"actor would ever start; they are {', '.join(NAMED)} or what nodes were started with"
                )
        lost = WorkerDiedError(
            f"stage {', '.join(repr(stage.name) for stage in stages)}: the Ray actors have ended, because "
            "ray.shutdown() was called. Close the loader first; to resume, call ray.init(), make another loader and "
            "give it the state_dict() of this one"
        )
        self._connection = Connection(lambda: fail(lost))

    def _seal(self, operator: Operator | Source, stage: str) -> object:
        import ray

        from pipegraph.engine.actors.parcel import Parcel

        try:
            return ray.put(Parcel(operator))
        except Exception as error:
            raise cannot_be_sent(operator, stage, error) from error

    def _host(self, stage: StagePlan, context: Context, sealed: object, opening: tuple[object, ...]) -> Host:
        from pipegraph.engine.actors.actor_host import ActorHost

        spec, asked = stage.spec, stage.backend
        assert isinstance(asked, Ray)
        options = actor_options(asked.resources, asked.runtime_env, spec.timeout is not None)
        return ActorHost(options, context, (sealed, *opening), spec.timeout, self._connection)

    def close(self) -> None:
        """Called after every worker has closed its own actor."""
        self._connection.leave()
        self._sent.clear()


def actor_options(
    resources: Mapping[str, float], runtime_env: Mapping[str, object] | None, looked_at: bool
) -> dict[str, object]:
    """Ray's options for one actor.

    >>> actor_options({"num_cpus": 2, "decoder": 1}, None, False)["resources"]
    {'decoder': 1}
    """
    options: dict[str, Any] = {"num_cpus": 1, "resources": {}}
    for name, amount in resources.items():
        (options if name in NAMED else options["resources"])[name] = amount
    if runtime_env is not None:
        options["runtime_env"] = dict(runtime_env)
    if looked_at:  # ``look`` needs a second thread; without it the work is done in the process's main thread
        options["concurrency_groups"] = {"look": 1}
    # Spread over nodes, so that a lost node takes few of a stage's actors with it. Restarts and retries are ours.
    return {**options, "scheduling_strategy": "SPREAD", "max_restarts": 0, "max_task_retries": 0}
