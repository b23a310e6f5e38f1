"""Orders: pure functions from (seed, epoch, rank, step) to a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegraph.importing import lazy_names

if TYPE_CHECKING:
    from pipegraph.order.base import History as History, Order as Order
    from pipegraph.order.block_order import BlockOrder as BlockOrder
    from pipegraph.order.lane_order import LaneOrder as LaneOrder
    from pipegraph.order.layout import (
        LayoutLike as LayoutLike,
        ManifestLike as ManifestLike,
        layout_digest as layout_digest,
        total_samples as total_samples,
    )
    from pipegraph.order.part_order import PartOrder as PartOrder
    from pipegraph.order.strided_order import StridedOrder as StridedOrder

_MODULES = {
    "base": "History Order",
    "block_order": "BlockOrder",
    "lane_order": "LaneOrder",
    "layout": "LayoutLike ManifestLike layout_digest total_samples",
    "part_order": "PartOrder",
    "strided_order": "StridedOrder",
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULES)
