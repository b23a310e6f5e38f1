"""Compiles replicas so that gradients still arrive bucket by bucket."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Module

from pipegraph.errors import PipegraphWarning
from pipegraph.replicas.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES

PREFIX = "_orig_mod."


def compiled(module: Module, options: Mapping[str, Any]) -> Callable[..., Any]:
    """``torch.compile(module, **options)`` with graphs split at bucket size.

    A module compiled whole gives all its gradients at the very end of backward. Dynamo's ``DDPOptimizer``
    splits its graph where buckets end. It takes a backend by name or function; where ``mode`` or
    ``options`` ask for more, the module is compiled whole, and a warning says that nothing overlaps.
    """
    if options.get("mode") or options.get("options") or options.get("fullgraph"):
        warn_of_no_overlap("compile= with mode, options or fullgraph compiles the module whole")
        return torch.compile(module, **options)
    from torch._dynamo import lookup_backend
    from torch._dynamo.backends.distributed import DDPOptimizer

    backend = options.get("backend", "inductor")
    splitting = DDPOptimizer(
        BUCKET_BYTES,
        lookup_backend(backend) if isinstance(backend, str) else backend,
        first_bucket_cap=FIRST_BUCKET_BYTES,
    )
    rest = {key: value for key, value in options.items() if key != "backend"}
    return torch.compile(module, backend=splitting.compile_fn, **rest)


def warn_of_no_overlap(why: str) -> None:
    """The executor works all the same."""
    warnings.warn(
        f"{why}: all gradients come at the end of backward, so their reduction overlaps with nothing; use "
        "compile=dict(backend=...)",
        PipegraphWarning,
        stacklevel=5,
    )


def unwrapped(model: Module) -> tuple[Module, Callable[[Module], Callable[..., Any]] | None]:
    """The module inside ``torch.compile``'s wrapper, and how to wrap copies alike (None without one)."""
    if "_orig_mod" not in model._modules:
        return model, None  # without loading the compiler, which takes seconds
    from torch._dynamo.eval_frame import OptimizedModule

    assert isinstance(model, OptimizedModule)
    context = model.dynamo_ctx
    return model._orig_mod, lambda copy: OptimizedModule(copy, context)


def own_keys(state: Mapping[str, Any], module: Module) -> dict[str, Any]:
    """A state with plain keys under the keys that `module` has, whose submodules may be compiled."""
    known = {key.replace(PREFIX, ""): key for key in module.state_dict()}
    return {known.get(key, key): value for key, value in plain_keys(state).items()}


def plain_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state's keys without the compiler's prefix."""
    return {key.replace(PREFIX, ""): value for key, value in state.items()}
