"""pipegraph: a pipeline-graph data loading framework for PyTorch.

>>> import pipegraph as pg
>>> from pipegraph import operators as ops
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegraph.importing import lazy_names

if TYPE_CHECKING:
    import pipegraph.testing as testing  # noqa: F401
    from pipegraph import operators as operators, order as order, replicas as replicas
    from pipegraph.chunk import Chunk as Chunk
    from pipegraph.contracts import (
        Context as Context,
        FanIn as FanIn,
        FanOut as FanOut,
        Operator as Operator,
        Regroup as Regroup,
        Source as Source,
    )
    from pipegraph.device.scattered import Scattered as Scattered
    from pipegraph.engine.stage.ledger import Quarantined as Quarantined
    from pipegraph.errors import PipegraphError as PipegraphError
    from pipegraph.graph import Graph as Graph, Node as Node
    from pipegraph.loader.in_lightning import lightning_callback as lightning_callback
    from pipegraph.loader.in_transformers import TrainOnLoader as TrainOnLoader
    from pipegraph.loader.loader import Loader as Loader
    from pipegraph.loader.torch_dataloader import DataLoader as DataLoader
    from pipegraph.measurements import StageProfile as StageProfile
    from pipegraph.planning.plan import Plan as Plan
    from pipegraph.policies import Retry as Retry, Skip as Skip
    from pipegraph.profile.live import live as live
    from pipegraph.profile.record import record as record
    from pipegraph.profile.values import ChannelProfile as ChannelProfile, Profile as Profile
    from pipegraph.replicas import ReplicaExecutor as ReplicaExecutor
    from pipegraph.storage.node_cache import NodeCache as NodeCache
    from pipegraph.storage.writing.shard_writer import ShardWriter as ShardWriter
    from pipegraph.tuning.decisions import Tuning as Tuning

__version__ = "0.1.0"

# Imported at first use: `import pipegraph` starts nothing, and what needs no torch, such as `pipegraph pack`, does not
# wait for its import.
_MODULES = {
    "": "errors operators order replicas testing",
    "chunk": "Chunk",
    "contracts": "Context FanIn FanOut Operator Regroup Source",
    "device.scattered": "Scattered",
    "engine.stage.ledger": "Quarantined",
    "errors": "PipegraphError",
    "graph": "Graph Node",
    "loader.in_lightning": "lightning_callback",
    "loader.in_transformers": "TrainOnLoader",
    "loader.loader": "Loader",
    "loader.torch_dataloader": "DataLoader",
    "measurements": "StageProfile",
    "planning.plan": "Plan",
    "policies": "Retry Skip",
    "profile.live": "live",
    "profile.record": "record",
    "profile.values": "ChannelProfile Profile",
    "replicas": "ReplicaExecutor",
    "storage.node_cache": "NodeCache",
    "storage.writing.shard_writer": "ShardWriter",
    "tuning.decisions": "Tuning",
}
__getattr__, __dir__, _LATER = lazy_names(__name__, _MODULES)
