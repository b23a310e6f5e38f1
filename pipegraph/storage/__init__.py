"""Storage: object stores, shard formats, manifests, the node cache.

Mechanism only: knows no graph, no operator and no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegraph.errors import StoreError as StoreError
from pipegraph.lazy_names import lazy_names

if TYPE_CHECKING:
    from .entries import Cacheable as Cacheable, CacheStats as CacheStats
    from .indexing import IndexProgress as IndexProgress, build_manifest as build_manifest
    from .local import LocalParts as LocalParts
    from .manifest import Manifest as Manifest
    from .node_cache import NodeCache as NodeCache
    from .object_file import RemoteFile as RemoteFile, open_part as open_part
    from .open_blocks import open_block as open_block
    from .parts import Part as Part, expand_parts as expand_parts
    from .retries import Backoff as Backoff
    from .shard_files import (
        BytesFile as BytesFile,
        LocalFile as LocalFile,
        OverlayFile as OverlayFile,
        ShardFile as ShardFile,
    )
    from .stores import StoreClient as StoreClient
    from .writing import ShardWriter as ShardWriter, pack_shards as pack_shards

# Imported at first use: files need no shards, shards that are read no writers, and local ones no stores.
_MODULES = {
    "entries": "Cacheable CacheStats",
    "indexing": "IndexProgress build_manifest",
    "local": "LocalParts",
    "manifest": "Manifest",
    "node_cache": "NodeCache",
    "object_file": "RemoteFile open_part",
    "open_blocks": "open_block",
    "parts": "Part expand_parts",
    "retries": "Backoff",
    "shard_files": "BytesFile LocalFile OverlayFile ShardFile",
    "stores": "StoreClient",
    "writing": "ShardWriter pack_shards",
}
__getattr__, __dir__, _LATER = lazy_names(__name__, _MODULES)
