"""What the nodes of a Ray cluster have, and which of it an actor still waits for. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipegraph.units import format_bytes

Resources = Mapping[str, float]

NAMED = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
"""Resources for which Ray has separate options, and their names on its nodes."""


def needs(options: Mapping[str, Any]) -> dict[str, float]:
    """What an actor with these options needs of its node.

    >>> needs({"num_cpus": 2, "num_gpus": 0, "resources": {"decoder": 1}})
    {'CPU': 2, 'decoder': 1}
    """
    found = {ray: options.get(name, 0) for name, ray in NAMED.items()} | options["resources"]
    return {name: amount for name, amount in found.items() if amount}


def unknown(resources: Resources, nodes: Iterable[Resources]) -> str:
    """What is wrong with a stage's resources whose name no node has; else empty."""
    there = {name for node in nodes for name in node} - {*NAMED.values()}
    for name, amount in resources.items():
        if name in NAMED or name in there or not amount:
            continue
        shown = sorted(each for each in there if ":" not in each and each != "object_store_memory")
        near = difflib.get_close_matches(name, [*NAMED, *shown], 1)
        meant = f"did you mean {near[0]!r}? It" if near else "it"
        return (
            f"resources={{{name!r}: {amount:g}}}: no node of the Ray cluster has such a resource, so that no actor "
            f"would ever start; {meant} must be {', '.join(map(repr, NAMED))} or one that a node was started with "
            f"(there {'are ' + ', '.join(map(repr, shown)) if shown else 'is none'}): "
            f"ray start --resources='{{\"{name}\": 1}}'"
        )
    return ""


def why_it_waits(
    wanted: Resources, running: bool, free: Sequence[Resources], whole: Sequence[Resources]
) -> str:
    """Why an actor has not started yet, and what helps.

    Args:
        running: whether its process runs.
        free, whole: what each node has left, and in all.
    """
    if running:
        return "is starting: its process runs, imports modules and opens the operator. Nothing is missing"
    if any(_fits(wanted, node) for node in free):
        return "is starting: a node has room for it, and starts its process. Nothing is missing"
    said = _said(wanted)
    if any(_fits(wanted, node) for node in whole):
        left = "; ".join(_said({name: node.get(name, 0) for name in wanted}) for node in free)
        return (
            f"waits for room: it needs {said} of one node, free are {left}. It joins when there is room; fewer "
            "workers=, smaller resources= or more nodes would help"
        )
    most = {name: max((node.get(name, 0) for node in whole), default=0) for name in wanted}
    return (
        f"waits for a new node: it needs {said}, and no node of the cluster has as much (at most {_said(most)}). "
        "Smaller resources= or such a node would help"
    )


def _fits(wanted: Resources, node: Resources) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in wanted.items())


def _said(resources: Resources) -> str:
    """
    >>> _said({"CPU": 2, "memory": 4 << 30})
    'CPU 2, memory 4.3 GB'
    """
    return ", ".join(
        f"{name} {format_bytes(int(n)) if name == 'memory' else f'{n:g}'}" for name, n in resources.items()
    )
