"""Arguments of other libraries and misspelt ones, and their equivalents here."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_HERE = {
    "num_workers max_workers num_parallel_calls num_threads concurrency n_jobs num_proc": (
        "workers= of a stage: graph.add(operator, workers=4), node.then(function, workers=4)"
    ),
    "workers backend capacity timeout on_error ordered": (
        "an option of a stage: graph.add(operator, workers=4), node.then(function, on_error=pg.Skip(2))"
    ),
    "prefetch_factor prefetch buffer_size queue_size maxsize": (
        "capacity= of a stage, the items that its queue may hold"
    ),
    "batch_size batch": "the operator ops.Batch(size)",
    "collate_fn collate": "ops.Batch(size, collate=function)",
    "drop_last": "ops.Batch(size, drop_last=True)",
    "shuffle": "ops.FromSequence(dataset, shuffle=True), or ops.Shuffle(window) behind a stream",
    "sampler": "ops.FromSequence(dataset, sampler=sampler)",
    "pin_memory": "the operator ops.Pin()",
    "normalize mean std": "the operator ops.Normalize(mean, std) behind it",
    "in_order deterministic order": "ordered= of a stage",
    "num_epochs repeat": "epochs= of graph.loader()",
    "seed generator": "pg.Graph(name, seed=1)",
    "executor mode multiprocessing_context": "backend= of a stage: 'thread' or 'process'",
    "persistent_workers": "nothing: workers live until the loader is closed",
    "worker_init_fn": "a pg.Operator or pg.Source of your own with open(context), or pg.DataLoader",
    "retries retry": "on_error=pg.Retry(3) of a stage",
    "num_shards num_replicas": "world_size= of graph.loader()",
}
HERE = {name: ours for names, ours in _HERE.items() for name in names.split()}
"""The equivalent of a foreign argument."""


def names_ours(function: Function) -> Function:
    """Let a call with an unknown argument fail with the one that is meant; the signature stays as it is.

    Raises:
        TypeError: the call has an argument that is another library's, or that nobody knows, or too many by position.
    """
    code = getattr(function, "__code__")  # noqa: B009 (a Callable has none for mypy)
    known = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    positional = sys.maxsize if code.co_flags & inspect.CO_VARARGS else code.co_argcount
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options:
            if name in known:
                continue
            # "epoch" is a misspelt "epochs", "num_workers" is not.
            near = [] if name in HERE else difflib.get_close_matches(name, known, 1)
            here = f"here that is {HERE[name]}" if name in HERE else f"it takes {', '.join(known)}"
            raise TypeError(f"{owner}() has no {name}=; " + (f"did you mean {near[0]}=?" if near else here))
        if len(args) > positional:
            chain = " and chain stages, node.then(a).then(b)" if owner == "Node.then" else ""
            raise TypeError(
                f"{owner}() takes {positional - 1} by position ({', '.join(known[: positional - 1])}), "
                f"got {len(args) - 1}: give options by name{chain}"
            )
        return function(*args, **options)

    return checked  # type: ignore[return-value]
