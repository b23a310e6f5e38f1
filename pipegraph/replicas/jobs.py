"""The jobs of a replica's thread in each phase of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipegraph.replicas.parameter_gather import Exchange
from pipegraph.replicas.replica_threads import Job

#: ``forward(module, part)``
Forward = Callable[[Callable[..., Any], Any], Any]
#: ``loss(outputs, part)``
Loss = Callable[[Any, Any], Any]


def by_signature(module: Callable[..., Any], part: Any) -> Any:
    """The default ``forward``: a mapping as keyword arguments where the module takes them, else the part as it is."""
    if isinstance(part, Mapping) and _takes(module, part):
        return module(**part)
    return module(part)


def _takes(module: Any, part: Mapping[Any, Any]) -> bool:
    called = getattr(module, "_orig_mod", module)
    try:
        inspect.signature(getattr(called, "forward", called)).bind(**part)
    except (TypeError, ValueError):  # other keys; or nothing that has a signature
        return False
    return True


def call_job(module: Callable[..., Any], fetch: Callable[[], Any]) -> Job:
    """Fetch arguments and call the replica."""

    def work() -> Any:
        args, kwargs = fetch()
        return module(*args, **kwargs)

    return work


def step_job(module: Callable[..., Any], fetch: Callable[[], Any], forward: Forward, loss: Loss) -> Job:
    """Fetch a part; outputs and loss of it."""

    def work() -> Any:
        part = fetch()
        outputs = forward(module, part)
        return outputs, loss(outputs, part)

    return work


def backward_job(share: torch.Tensor) -> Job:
    """The backward of a replica's share of the loss."""
    return lambda: share.backward()  # type: ignore[no-untyped-call]


def after(exchange: Exchange, replica: int, job: Job) -> Job:
    """`job` once the replica has its new parameters from their owners."""

    def work() -> Any:
        exchange.wait(replica)
        return job()

    return work
