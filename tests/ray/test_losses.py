"""Nodes, actors and memory that are lost in the middle of an epoch: the same batches, and exact states."""

import itertools
import json
import os
import random
import warnings

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing.outcome import DeliveredChunk, placed, run_pass

QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}


@pytest.fixture
def two_nodes():
    """A cluster of two nodes with room for one actor each; the second may be killed and replaced."""
    import ray
    from ray.cluster_utils import Cluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "object_store_memory": 150_000_000,
                "include_dashboard": False,
                "_system_config": QUICK_TO_NOTICE,
            },
        )
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def pipeline(backend, items=600):
    def work(sample, rng):
        return {"key": sample["key"], "large": rng.random(20_000), "small": np.float64(rng.random())}

    graph = pg.Graph("losses", seed=11)
    read = graph.add(ops.FromSequence([{"key": i} for i in range(items)], shuffle=True))
    made = read.then(work, name="work", workers=2, backend=backend, capacity=16)
    made.then(ops.Batch(7), capacity=2)
    return graph


def replace_node(cluster, nodes):
    """Kill the second node as a machine that loses its power, and add another one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        nodes.append(cluster.add_node(num_cpus=1, object_store_memory=100_000_000))


def with_kills(cluster, kills, items):
    """The chunks of an epoch in which the second node is killed so many times, and a state after each kill."""
    numbers = random.Random(kills)
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=100_000_000)]
    found, states = [], []
    count = -(-items // 7)
    moments = set(numbers.sample(range(1, count - 1), kills))
    with pipeline("ray", items).loader() as loader:
        for number, chunk in enumerate(loader.chunks()):
            found.append(DeliveredChunk.of(chunk))
            if number in moments:  # the stages work on meanwhile
                states.append((len(found), json.dumps(loader.state_dict())))
                replace_node(cluster, nodes)
        deaths = sum(worker.operator._host.deaths for worker in loader._crew.workers["work"])
    return tuple(found), states, deaths


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_node_that_is_killed_at_random_moments_changes_nothing_that_is_delivered(two_nodes, kills):
    items = 60 * kills
    with placed(pipeline("inline", items), "inline", 1).loader() as loader:
        whole = run_pass(loader).chunks
    found, states, deaths = with_kills(two_nodes, kills, items)
    assert deaths, "no actor was on a node that was killed"
    assert found == whole
    for count, state in states:
        with placed(pipeline("inline", items), "inline", 1).loader() as loader:
            loader.load_state_dict(json.loads(state))
            assert run_pass(loader).chunks == whole[count:]
    count, state = states[0]
    with pipeline("ray", items).loader() as loader:
        loader.load_state_dict(json.loads(state))
        assert run_pass(loader).chunks == whole[count:]


def test_an_actor_for_which_a_node_comes_later_joins_in_the_middle_of_an_epoch(two_nodes):
    graph = pg.Graph("g")
    numbers = graph.add(ops.FromIterable(itertools.count))
    numbers.then(ops.Map(lambda x: (x, os.getpid())), name="work", workers=2, backend="ray")
    pids = set()
    with graph.loader() as loader:
        for expected, (x, pid) in enumerate(loader):  # one actor has room, until the node is there
            assert x == expected
            if not pids:
                two_nodes.add_node(num_cpus=1, object_store_memory=100_000_000)
            pids.add(pid)
            if len(pids) == 2:
                break
    assert len(pids) == 2
