"""Orders: pure functions from (seed, epoch, rank, step) to a sample."""

from __future__ import annotations

from pipegraph.order.base import History as History
from pipegraph.order.base import Order as Order
from pipegraph.order.layout import LayoutLike as LayoutLike
from pipegraph.order.layout import ManifestLike as ManifestLike
from pipegraph.order.strided import StridedOrder as StridedOrder

__all__ = ["History", "LayoutLike", "ManifestLike", "Order", "StridedOrder"]
