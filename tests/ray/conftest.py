"""A Ray cluster of one small node for the tests of this folder, which are left out where Ray is not installed.

`make test` installs no Ray; `make test-ray` does, into an environment of its own.
"""

import importlib.util
import os
import warnings

import pytest

if importlib.util.find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_TRAIN_V2_ENABLED"] = "1"

QUIET = {"enable_worker_prestart": False, "prestart_worker_first_driver": False}
"""Ray would start as many idle Python processes as the node has CPUs."""

MEMORY = 200_000_000


def pytest_collection_modifyitems(items):
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker("ray")
            # Ray's own code warns; what it leaves to the garbage collector is not ours.
            for kind in (
                "ResourceWarning",
                "DeprecationWarning",
                "FutureWarning",
                "PytestUnraisableExceptionWarning",
            ):
                name = f"pytest.{kind}" if kind.startswith("Pytest") else kind
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{name}"))


@pytest.fixture(scope="module")
def cluster():
    """Connected to a local cluster with 16 logical CPUs, ended with the module."""
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=16,
            include_dashboard=False,
            object_store_memory=MEMORY,
            log_to_driver=False,
            logging_level="ERROR",
            _system_config=QUIET,
        )
    yield ray
    ray.shutdown()


@pytest.fixture
def live_actors(cluster):
    """A function: the actors of this test that have not ended. Those of a test before may take Ray a while to end."""
    from ray._private.state import actors

    before = set(actors())
    return lambda: [each for key, each in actors().items() if key not in before and each["State"] != "DEAD"]
