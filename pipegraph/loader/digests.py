"""What identifies a graph in a state: a digest per stage, and the names of users' functions. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping

from pipegraph.errors import StateError
from pipegraph.parameters import function_name
from pipegraph.planning.plan import Plan, StagePlan
from pipegraph.stage_spec import Edge, StageSpec

OUTPUT = "(output)"
"""Beside the stages: what the loader delivers."""


def described(plan: Plan) -> list[StagePlan]:
    """The stages that decide what is delivered, wherever their work is done; in topological order."""
    return [stage for stage in plan.stages.values() if stage.runs or stage.within is not None]


def parameters(spec: StageSpec) -> Mapping[str, object]:
    """What a stage's operator says of its parameters, or else what its plain attributes say."""
    return spec.operator.config() if spec.parameters is None else spec.parameters


def digests(plan: Plan) -> dict[str, str]:
    """A short digest per stage of what decides what it delivers, and behind a colon of what it reads from.

    A stage whose work another one does counts as if it ran: a state holds whatever the plan fuses.
    """

    def edge_of(edge: Edge) -> Edge:
        while not (stage := plan.stages[edge.stage]).runs and stage.within is None:
            edge = stage.spec.upstream[0]
        return edge

    found = {}
    for stage in described(plan):
        kind = type(stage.spec.operator)
        named = f"{kind.__module__}.{kind.__qualname__}"
        parts = [named, parameters(stage.spec), *([] if stage.spec.ordered else ["unordered"])]
        upstream = [[each.stage, each.output] for each in map(edge_of, stage.spec.upstream)]
        text = json.dumps(parts, sort_keys=True, default=repr)
        found[stage.name] = f"{_short(text, 6)}:{_short(json.dumps(upstream), 3)}"
    output = edge_of(plan.asked or plan.output)
    return {**found, OUTPUT: f"{output.stage}:{output.output}"}


def functions_of(plan: Plan) -> dict[str, str]:
    """Of each stage with functions: their names."""
    found = {}
    for stage in described(plan):
        names = [function_name(each).partition("(")[0] for each in stage.spec.operator.traits.functions]
        if names:
            found[stage.name] = ",".join(names)
    return found


def check_digests(
    plan: Plan,
    saved: Mapping[str, str],
    allow: Collection[str] = (),
    functions: Mapping[str, str] | None = None,
) -> bool:
    """Whether a saved graph is this one.

    Args:
        allow: stages that may differ, be missing or be new, with what reads from them.
        functions: what :func:`functions_of` gave there.

    Raises:
        StateError: it differs elsewhere; names these stages.
    """
    ours, functions = digests(plan), functions or {}
    if dict(saved) == ours:
        return True
    unknown = [name for name in allow if name not in saved and name not in ours]
    if unknown:
        raise StateError(f"allow: neither graph has a stage {', '.join(map(repr, unknown))}")
    words = [
        text
        for name in {**ours, **saved}
        if name not in allow and saved.get(name) != ours.get(name)
        for text in _difference(plan, name, saved.get(name), ours.get(name), bool(allow), functions)
    ]
    if not words:
        return False
    raise StateError(
        f"the state is of another graph than {plan.graph_name!r}: {'; '.join(words)}. If that is meant, name these "
        "stages in load_state_dict(state, allow=(...))"
    )


def _difference(
    plan: Plan, name: str, saved: str | None, ours: str | None, allows: bool, functions: Mapping[str, str]
) -> Iterator[str]:
    """In words; ``allows``: a stage may read from, or the loader deliver, another one."""
    if ours is None:
        yield f"stage {name!r} of the state is not in the graph"
    elif saved is None:
        yield f"stage {name!r} is not in the state"
    elif allows and (name == OUTPUT or saved.partition(":")[0] == ours.partition(":")[0]):
        return
    elif name == OUTPUT:
        yield f"it delivered from {saved}, this graph from {ours}"
    else:
        spec = plan.stages[name].spec
        before, now = functions.get(name, ""), functions_of(plan).get(name, "")
        origin = spec.operator.traits.origin()
        if before not in ("", now):
            yield f"stage {name!r} had the function {before}, now {now}"
        else:
            yield f"stage {name!r} has other parameters or inputs{f' (here it has {origin})' if origin else ''}"


def _short(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()
