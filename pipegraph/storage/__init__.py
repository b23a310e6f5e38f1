"""Storage: object stores, shard formats, manifests, the node cache; here the names that pages tell users to import.

Mechanism only: knows no graph, no operator and no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegraph.importing import lazy_names

if TYPE_CHECKING:
    from .indexing import build_manifest as build_manifest
    from .manifest import Manifest as Manifest
    from .node_cache import NodeCache as NodeCache
    from .parts import Part as Part
    from .shard_files import ShardFile as ShardFile
    from .stores import register_store as register_store
    from .writing.pack import pack_shards as pack_shards
    from .writing.shard_writer import ShardWriter as ShardWriter

# Imported at first use: files need no shards, and shards that are read no writers.
_MODULES = {
    "indexing": "build_manifest",
    "manifest": "Manifest",
    "node_cache": "NodeCache",
    "stores": "register_store",
    "parts": "Part",
    "shard_files": "ShardFile",
    "writing.pack": "pack_shards",
    "writing.shard_writer": "ShardWriter",
}
__getattr__, __dir__, _LATER = lazy_names(__name__, _MODULES)
