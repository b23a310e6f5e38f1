"""pipegraph: a pipeline-graph data loading framework for PyTorch.

>>> import pipegraph as pg
>>> from pipegraph import operators as ops
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegraph.importing import lazy_names

if TYPE_CHECKING:
    import pipegraph.testing as testing  # noqa: F401
    from pipegraph import operators as operators, order as order, replicas as replicas, types as types
    from pipegraph.backends import Ray as Ray
    from pipegraph.chunk import Chunk as Chunk
    from pipegraph.contracts import (
        Context as Context,
        FanIn as FanIn,
        FanOut as FanOut,
        Operator as Operator,
        Regroup as Regroup,
        Source as Source,
        Traits as Traits,
    )
    from pipegraph.device.split import Scattered as Scattered
    from pipegraph.errors import PipegraphError as PipegraphError
    from pipegraph.graph import Graph as Graph, Node as Node
    from pipegraph.loader.in_lightning import lightning_callback as lightning_callback
    from pipegraph.loader.in_transformers import TrainOnLoader as TrainOnLoader
    from pipegraph.loader.loader import Loader as Loader
    from pipegraph.loader.torch_dataloader import DataLoader as DataLoader
    from pipegraph.profile.live import live as live
    from pipegraph.profile.record import record as record
    from pipegraph.profile.values import Profile as Profile
    from pipegraph.replicas import ReplicaExecutor as ReplicaExecutor
    from pipegraph.stage_spec import Retry as Retry, Skip as Skip
    from pipegraph.storage.node_cache import NodeCache as NodeCache
    from pipegraph.storage.writing.shard_writer import ShardWriter as ShardWriter

__version__ = "0.1.0"

# Imported at first use: `import pipegraph` starts nothing, and what needs no torch, such as `pipegraph pack`, does not
# wait for its import.
_MODULES = {
    "": "errors operators order replicas testing types",
    "backends": "Ray",
    "chunk": "Chunk",
    "contracts": "Context FanIn FanOut Operator Regroup Source Traits",
    "device.split": "Scattered",
    "errors": "PipegraphError",
    "graph": "Graph Node",
    "loader.in_lightning": "lightning_callback",
    "loader.in_transformers": "TrainOnLoader",
    "loader.loader": "Loader",
    "loader.torch_dataloader": "DataLoader",
    "profile.live": "live",
    "profile.record": "record",
    "profile.values": "Profile",
    "replicas": "ReplicaExecutor",
    "stage_spec": "Retry Skip",
    "storage.node_cache": "NodeCache",
    "storage.writing.shard_writer": "ShardWriter",
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULES)
