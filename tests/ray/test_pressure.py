"""More than the object store has room for, and a trainer that is killed."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.usefixtures("cluster")


def test_the_actors_of_a_trainer_that_is_killed_end_with_it(cluster, live_actors):
    script = """
        import os, sys
        import ray
        import pipegraph as pg
        from pipegraph import operators as ops

        ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
        graph = pg.Graph("g")
        graph.add(ops.FromSequence(range(1000))).then(ops.Map(lambda x: x), backend="ray")
        batches = iter(graph.loader())
        next(batches)
        print("running", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), cluster.get_runtime_context().gcs_address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "running\n"
        assert len(live_actors()) == 1
        trainer.kill()
    for _ in range(600):  # Ray tells nobody when it has noticed; each question takes it some milliseconds
        if not live_actors():
            return
    raise AssertionError(f"left: {live_actors()}")
