"""Scales the replicas' losses *before* backward, so that their gradients sum to those of one loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from pipegraph.device.copy import sent
from pipegraph.errors import ReplicaError

Reduction = Literal["mean", "sum"]


def shares(
    values: Mapping[int, Any], rows: Mapping[int, int | None], reduction: Reduction, device: torch.device
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Scaled losses by replica, whose gradients simply add up, and the loss of the whole batch.

    A mean counts with its part's rows; a sum as it is; a pair ``(total, weight)`` gives the sum of totals
    over the sum of weights, which alone is right where rows weigh differently (class weights,
    ``ignore_index``). Weights stay on their devices: no value is read by the host.

    Args:
        values: by replica what ``loss`` returned.
        rows: by replica the rows of its part.
        reduction: of a loss that is no pair.
        device: of the second result.

    Raises:
        ReplicaError: a value is no 0-dim tensor and no pair, or the replicas returned different kinds.
    """
    if reduction not in ("mean", "sum"):
        raise ReplicaError(
            f"reduction must be 'mean' or 'sum', got {reduction!r}; for other weights return a pair"
        )
    pairs = {replica: _pair(value) for replica, value in values.items()}
    if len({pair is None for pair in pairs.values()}) > 1:
        raise ReplicaError("loss returned a pair (total, weight) on some replicas and a plain loss on others")
    scaled: dict[int, torch.Tensor] = {}
    if None not in pairs.values():
        weights = {replica: pair[1] for replica, pair in pairs.items() if pair is not None}
        for replica, pair in pairs.items():
            assert pair is not None
            scaled[replica] = pair[0] / _sum(list(weights.values()), pair[0].device)
    else:
        for value in values.values():
            _check(value)
        if reduction == "sum" or len(values) == 1:
            # One part that is the whole batch is left as it is, to the last bit.
            scaled = dict(values)
        else:
            parts = _parts_of_rows({replica: rows[replica] for replica in values})
            scaled = {replica: value * parts[replica] for replica, value in values.items()}
    total = torch.stack([sent(share.detach(), device) for share in scaled.values()]).sum()
    return scaled, total


def _parts_of_rows(counts: Mapping[int, int | None]) -> dict[int, float]:
    """Each part's share of all rows."""
    whole = sum(count or 0 for count in counts.values())
    parts = {}
    for replica, count in counts.items():
        if count is None or whole == 0:
            raise ReplicaError(
                f"cannot say how many rows part {replica} of the batch has, so means over rows cannot be put "
                "together: return a pair (total, weight) from loss, or use reduction='sum'"
            )
        parts[replica] = count / whole
    return parts


def _pair(value: Any) -> tuple[torch.Tensor, torch.Tensor | float] | None:
    if not (isinstance(value, tuple) and len(value) == 2):
        return None
    total, weight = value
    _check(total)
    if isinstance(weight, torch.Tensor):
        if weight.dim() > 0:
            raise ReplicaError(
                f"the weight of a loss must be a number or 0-dim, got shape {tuple(weight.shape)}"
            )
        weight = weight.detach()
    return total, weight


def _sum(weights: Sequence[torch.Tensor | float], device: torch.device) -> torch.Tensor | float:
    total: torch.Tensor | float = 0.0
    for weight in weights:
        total = total + (sent(weight, device) if isinstance(weight, torch.Tensor) else weight)
    return total


def _check(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.dim() > 0:
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ReplicaError(
            "loss must return a 0-dim tensor (a mean over the rows of its part, or a sum with "
            f"reduction='sum') or a pair (total, weight), got {got}"
        )
