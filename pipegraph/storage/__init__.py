"""Storage: object stores, shard formats, manifests, the node cache.

Mechanism only: knows no graph, no operator and no engine.
"""

from __future__ import annotations

from pipegraph.errors import StoreError as StoreError

from .blocks import open_block as open_block
from .cache import Cacheable as Cacheable
from .cache import CachedFile as CachedFile
from .cache import CacheStats as CacheStats
from .cache import NodeCache as NodeCache
from .eviction import UsePlan as UsePlan
from .files import BytesFile as BytesFile
from .files import LocalFile as LocalFile
from .files import OverlayFile as OverlayFile
from .files import ShardFile as ShardFile
from .indexing import IndexProgress as IndexProgress
from .indexing import build_manifest as build_manifest
from .local import LocalParts as LocalParts
from .manifest import Manifest as Manifest
from .opening import open_part as open_part
from .parts import Part as Part
from .parts import expand_parts as expand_parts
from .policy import Retry as Retry
from .remote import RemoteFile as RemoteFile
from .stores import StoreClient as StoreClient
