"""Writes reduced sums to .grad."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from pipegraph.replicas.bucket_layout import BucketLayout
from pipegraph.replicas.coalesce import sum_in_order
from pipegraph.replicas.group import Ranks

#: What a parameter's gradients are.
NONE, DENSE, SPARSE = 0, 1, 2


def kinds(layout: BucketLayout, parameters: Sequence[Sequence[Parameter]], sparse: set[int]) -> list[int]:
    """By parameter what its gradients on these replicas are; all backwards have returned."""
    found = [NONE] * len(parameters[0])
    for live in layout.buckets:
        for _, index in live.marked:
            found[index] = SPARSE if index in sparse else DENSE
    for index in layout.apart:
        if layout.hooked[index] and any(given[index].grad is not None for given in parameters):
            found[index] = SPARSE
    return found


class Sums:
    """Hands the sums of a step to the parameters.

    Args:
        parameters: per replica, in the same order.
        owners: the replica that steps each parameter; None where all do.
    """

    def __init__(
        self, parameters: Sequence[Sequence[Parameter]], owners: Sequence[int] | None, ranks: Ranks | None
    ) -> None:
        self._parameters = parameters
        self._owners = owners
        self._ranks = ranks

    def give(self, layout: BucketLayout, flags: Sequence[int]) -> None:
        """Set every replica's ``.grad``: views of buckets, valid until these are written again."""
        sparse = self._sparse(flags)
        for index, wanted in enumerate(layout.hooked):
            for replica, given in enumerate(self._parameters if wanted else ()):
                elsewhere = self._owners is not None and self._owners[index] != replica
                if flags[index] == NONE or elsewhere:
                    given[index].grad = None
                elif index in sparse:
                    given[index].grad = sparse[index].to(given[index].device, copy=True)
                else:
                    given[index].grad = layout.home[index].views[replica][index]

    def give_first(self, layout: BucketLayout, flags: Sequence[int]) -> None:
        """Set the first replica's ``.grad`` alone, to tensors that stay; the others' to None."""
        sparse = self._sparse(flags)
        for index, first in enumerate(self._parameters[0]):
            if not layout.hooked[index]:
                continue
            if index in sparse:
                first.grad = sparse[index]
            elif flags[index] == DENSE:
                live = layout.home[index]
                reduced = live.views[live.plan.owner][index]
                if first.grad is None or first.grad is live.views[0][index]:
                    first.grad = torch.empty_like(reduced, device=first.device)
                first.grad.copy_(reduced)
            for given in self._parameters[1:]:
                given[index].grad = None

    def _sparse(self, flags: Sequence[int]) -> dict[int, torch.Tensor]:
        """Sums of sparse gradients over replicas, then their means over ranks, in the parameters' order."""
        sums = {}
        for index, flag in enumerate(flags):
            if flag == SPARSE:
                first = self._parameters[0][index]
                grads = [given[index].grad for given in self._parameters]
                parts = [grad.to(first.device) for grad in grads if grad is not None]
                total = sum_in_order(parts) if parts else _no_rows(first)
                sums[index] = total if self._ranks is None else self._ranks.mean_of_sparse(total)
        return sums


def _no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """The sparse gradient of a parameter that was not used."""
    return torch.sparse_coo_tensor(
        torch.zeros((1, 0), dtype=torch.int64, device=parameter.device),
        parameter.new_zeros((0, *parameter.shape[1:])),
        parameter.shape,
        is_coalesced=True,
        check_invariants=False,
    )
