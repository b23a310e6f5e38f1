"""Writing shards: one shard at a time, or a whole dataset in parallel.

Mechanism only: what is written is the same whatever the workers and however often a run was stopped.
"""

from __future__ import annotations

from .pack import PackProgress as PackProgress, pack_shards as pack_shards
from .pack_sources import PackSource as PackSource
from .shard_writer import ShardWriter as ShardWriter
