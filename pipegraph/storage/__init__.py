"""Storage: object stores, shard formats, manifests, the node cache.

Mechanism only: knows no graph, no operator and no engine.
"""

from __future__ import annotations

from pipegraph.errors import StoreError as StoreError

from .indexing import IndexProgress as IndexProgress
from .indexing import build_manifest as build_manifest
from .local import LocalParts as LocalParts
from .manifest import Manifest as Manifest
from .node_cache import Cacheable as Cacheable
from .node_cache import CachedFile as CachedFile
from .node_cache import CacheStats as CacheStats
from .node_cache import NodeCache as NodeCache
from .object_file import RemoteFile as RemoteFile
from .open_blocks import open_block as open_block
from .opening import open_part as open_part
from .parts import Part as Part
from .parts import expand_parts as expand_parts
from .retries import Backoff as Backoff
from .shard_files import BytesFile as BytesFile
from .shard_files import LocalFile as LocalFile
from .shard_files import OverlayFile as OverlayFile
from .shard_files import ShardFile as ShardFile
from .stores import StoreClient as StoreClient
from .writing import ShardWriter as ShardWriter
from .writing import pack_shards as pack_shards
