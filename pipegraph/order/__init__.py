"""Orders: pure functions from (seed, epoch, rank, step) to a sample."""

from __future__ import annotations

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
