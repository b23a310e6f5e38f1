"""What a training step returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has come to.

    Attributes:
        loss: of the whole batch, as one device would have returned it; 0-dim, detached, on the first device.
        outputs: one entry per replica that had rows, detached, where it was computed; None unless asked for.
        grad_norm: the total gradient norm before clipping; None without ``clip_norm``.
        stepped: whether the optimizers stepped: not in ``no_sync``, nor after an overflow seen by the scaler.
    """

    loss: torch.Tensor
    outputs: tuple[Any, ...] | None = None
    grad_norm: torch.Tensor | None = None
    stepped: bool = True
