"""Replicas of a model on several device slots: the executor and its building blocks, each usable alone."""

from __future__ import annotations

from pipegraph.device.split import Whole as Whole, register_scatter as register_scatter
from pipegraph.replicas.executor import ReplicaExecutor as ReplicaExecutor, StepResult as StepResult
from pipegraph.replicas.replicate import (
    broadcast_coalesced as broadcast_coalesced,
    reduce_add_coalesced as reduce_add_coalesced,
    replicate as replicate,
)
from pipegraph.replicas.runner import parallel_apply as parallel_apply
from pipegraph.replicas.scatter import gather as gather, scatter as scatter
