"""The local Ray cluster that the benchmarks of Ray run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def connected(cpus: int, object_store_memory: int) -> Iterator[None]:
    """A cluster of this machine with so many logical CPUs and no process that is not needed."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Threads that Ray Data leaves behind would start another cluster.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    import ray

    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=object_store_memory,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
    )
    try:
        yield
    finally:
        ray.shutdown()
