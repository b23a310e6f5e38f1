"""`ray.shutdown()` while a loader has actors: the pass ends with an error, and no other cluster is started."""

import json
import warnings

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import WorkerDiedError


@pytest.fixture
def connect():
    """A function that connects to a new small cluster."""
    import ray

    def init():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                object_store_memory=100_000_000,
                log_to_driver=False,
                logging_level="ERROR",
                _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
            )
        return ray

    yield init
    ray.shutdown()


def pipeline(fn, items=40):
    graph = pg.Graph("g", seed=1)
    source = graph.add(ops.FromSequence(range(items), shuffle=True))
    source.then(fn, name="work", workers=2, backend="ray", capacity=4, on_error=pg.Skip(1.0))
    return graph


ENDED = (
    r"stage 'work': the Ray actors have ended, because ray.shutdown\(\) was called. Close the loader first"
)


def test_a_shutdown_in_the_middle_of_a_pass_ends_it_and_its_state_continues(connect):
    ray = connect()
    with pipeline(lambda x: x).loader() as loader:
        passing = iter(loader)
        found = [next(passing) for _ in range(5)]
        state = json.dumps(loader.state_dict())
        ray.shutdown()
        with pytest.raises(WorkerDiedError, match=ENDED):
            list(passing)
        with pytest.raises(WorkerDiedError, match=ENDED):
            next(iter(loader))
    assert not ray.is_initialized()
    connect()
    with pipeline(lambda x: x).loader() as loader:
        loader.load_state_dict(json.loads(state))
        assert sorted([*found, *loader]) == list(range(40))
