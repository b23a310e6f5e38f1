"""Collectives over an initialised process group. Collectives are torch.distributed's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module

from pipegraph.errors import ReplicaError

BROADCAST_BYTES = 250 * 1024 * 1024  # DDP's own limit for one message of parameters or buffers


class Ranks:
    """A process group, seen by one rank. Every rank must make the same calls in the same order.

    Raises:
        ReplicaError: the group has no backend for the device.
    """

    def __init__(self, device: torch.device, group: Any) -> None:
        self._device = device
        world: Any = dist.group.WORLD
        self._group = world if group is None else group
        try:
            self._group._get_backend(device)
        except RuntimeError as error:
            raise ReplicaError(
                f"the process group has no backend for {device.type!r} ({error}): initialise it with one "
                "('nccl' for GPUs, 'gloo' for the CPU), or pass process_group="
            ) from error
        self.world_size = dist.get_world_size(self._group)
        self.rank = dist.get_rank(self._group)

    @staticmethod
    def current(device: torch.device, group: Any = None) -> Ranks | None:
        """The given or initialised group, or None without one or with one rank only."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            return Ranks(device, group)
        return None

    def mean(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its mean over ranks, ordered on the current stream.

        Divided before the sum, as DDP does: the sum of large half-precision gradients may overflow.
        """
        tensor.div_(self.world_size)
        dist.all_reduce(tensor, group=self._group)

    def mean_of_sparse(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over ranks of a coalesced sparse tensor; gloo can do it, NCCL cannot.

        Raises:
            ReplicaError: the group's backend has no sparse sum.
        """
        if tensor.device.type != "cpu":
            raise ReplicaError(
                "sparse gradients are summed over ranks by gloo on the CPU only: use a dense embedding here"
            )
        total = tensor / self.world_size
        dist.all_reduce(total, group=self._group)
        return total.coalesce()

    def max_over_ranks(self, flags: Sequence[int]) -> torch.Tensor:
        """Flag by flag, the greatest of any rank (int32, ordered on the current stream)."""
        result = torch.tensor(flags, dtype=torch.int32, device=self._device)
        dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self._group)
        return result

    def first_ranks(self, order: Sequence[int]) -> list[int]:
        """Rank 0's list, which has the same length everywhere."""
        result = torch.tensor(order, dtype=torch.int64, device=self._device)
        dist.broadcast(result, group=self._group, group_src=0)
        return [int(index) for index in result.tolist()]

    def take_first_ranks(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors with rank 0's, many in one message as DDP does it."""
        # NCCL's broadcast knows no complex numbers.
        given = [torch.view_as_real(t.data) if t.is_complex() else t.data for t in tensors]
        if given:
            dist._broadcast_coalesced(self._group, given, BROADCAST_BYTES, 0)  # type: ignore[attr-defined]


def refuse_own_collectives(model: Module) -> None:
    """A module that makes collectives would make them once per replica, in no fixed order.

    Raises:
        ReplicaError: names the module.
    """
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        found = kinds & {"SyncBatchNorm", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
        if found:
            raise ReplicaError(
                f"module {name or 'at the top'!r} ({sorted(found)[0]}) makes collectives itself, which "
                "several replicas per process would mix up: use one device per process with it"
            )
