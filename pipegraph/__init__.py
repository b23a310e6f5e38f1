"""pipegraph: a pipeline-graph data loading framework for PyTorch.

>>> import pipegraph as pg
>>> from pipegraph import operators as ops
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegraph.lazy_names import lazy_names

if TYPE_CHECKING:
    import pipegraph.testing as testing  # noqa: F401
    from pipegraph import operators as operators
    from pipegraph import order as order
    from pipegraph import replicas as replicas
    from pipegraph.chunk import Chunk as Chunk
    from pipegraph.contracts import Context as Context
    from pipegraph.contracts import FanIn as FanIn
    from pipegraph.contracts import FanOut as FanOut
    from pipegraph.contracts import Operator as Operator
    from pipegraph.contracts import Regroup as Regroup
    from pipegraph.contracts import Source as Source
    from pipegraph.device.scattered import Scattered as Scattered
    from pipegraph.engine.stage.budgets import Quarantined as Quarantined
    from pipegraph.errors import PipegraphError as PipegraphError
    from pipegraph.graph import Graph as Graph
    from pipegraph.graph import Node as Node
    from pipegraph.loader.loader import Loader as Loader
    from pipegraph.loader.torch_dataloader import DataLoader as DataLoader
    from pipegraph.planning.plan import Plan as Plan
    from pipegraph.policies import Replace as Replace
    from pipegraph.policies import Retry as Retry
    from pipegraph.policies import Skip as Skip
    from pipegraph.profile import ChannelProfile as ChannelProfile
    from pipegraph.profile import Profile as Profile
    from pipegraph.profile import StageProfile as StageProfile
    from pipegraph.profile.live import live as live
    from pipegraph.profile.record import record as record
    from pipegraph.replicas import ReplicaExecutor as ReplicaExecutor
    from pipegraph.storage.node_cache import NodeCache as NodeCache
    from pipegraph.storage.writing.shard_writer import ShardWriter as ShardWriter
    from pipegraph.tuning import Tuning as Tuning

__version__ = "0.1.0"

# Imported at first use: `import pipegraph` starts nothing, and what needs no torch, such as `pipegraph pack`, does not
# wait for its import.
_LATER = {
    "Chunk": "pipegraph.chunk:Chunk",
    "Context": "pipegraph.contracts:Context",
    "FanIn": "pipegraph.contracts:FanIn",
    "FanOut": "pipegraph.contracts:FanOut",
    "Operator": "pipegraph.contracts:Operator",
    "Regroup": "pipegraph.contracts:Regroup",
    "Source": "pipegraph.contracts:Source",
    "PipegraphError": "pipegraph.errors:PipegraphError",
    "Graph": "pipegraph.graph:Graph",
    "Node": "pipegraph.graph:Node",
    "Replace": "pipegraph.policies:Replace",
    "Retry": "pipegraph.policies:Retry",
    "Skip": "pipegraph.policies:Skip",
    "operators": "pipegraph.operators",
    "order": "pipegraph.order",
    "replicas": "pipegraph.replicas",
    "testing": "pipegraph.testing",
    "errors": "pipegraph.errors",
    "ChannelProfile": "pipegraph.profile:ChannelProfile",
    "DataLoader": "pipegraph.loader.torch_dataloader:DataLoader",
    "Loader": "pipegraph.loader.loader:Loader",
    "NodeCache": "pipegraph.storage.node_cache:NodeCache",
    "Plan": "pipegraph.planning.plan:Plan",
    "Profile": "pipegraph.profile:Profile",
    "Quarantined": "pipegraph.engine.stage.budgets:Quarantined",
    "ReplicaExecutor": "pipegraph.replicas:ReplicaExecutor",
    "Scattered": "pipegraph.device.scattered:Scattered",
    "ShardWriter": "pipegraph.storage.writing.shard_writer:ShardWriter",
    "StageProfile": "pipegraph.profile:StageProfile",
    "Tuning": "pipegraph.tuning:Tuning",
    "live": "pipegraph.profile.live:live",
    "record": "pipegraph.profile.record:record",
}

__getattr__, __dir__ = lazy_names(__name__, _LATER)
