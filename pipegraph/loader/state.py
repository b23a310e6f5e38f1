"""Reads a loader's state before a resume: checks it, says what a rank continues with, warns of differences."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipegraph.engine.stage.cursors import freeze
from pipegraph.engine.stage.restore import Resume, Unknown, consumed, history_entry, why_unknown
from pipegraph.errors import PipegraphWarning, StateError
from pipegraph.loader.digests import check_digests, digests
from pipegraph.loader.place import check_state, decode_part
from pipegraph.order.left import Taken
from pipegraph.planning.plan import Plan


@dataclass(frozen=True)
class Restored:
    """What a rank continues with: ``streams`` one after the other, none if there are more ranks than parts.

    ``steps`` and ``dealt`` are the place's ``first`` and ``dealt``: ranks that share an epoch anew have made as many
    steps of it as the one that has made most.
    """

    seed: int | None
    epoch: int
    ledger: Any
    streams: tuple[Resume, ...]
    steps: int
    dealt: int | None
    iterators: Mapping[str, tuple[int, Any]] = field(default_factory=dict)


def read_state(
    state: Any, allow: str | Sequence[str], plan: Plan, rank: int, world_size: int, equal: bool
) -> Restored:
    """See :meth:`Loader.load_state_dict`; warnings point at its caller."""
    names = (allow,) if isinstance(allow, str) else tuple(allow)
    given = state if isinstance(state, list | tuple) else [state]
    if not given:
        raise StateError("the list of states is empty")
    for each in given:
        check_state(each)
    if not all(check_digests(plan, each["digest"], names, each["functions"]) for each in given):
        given = [_of_changed_graph(each, plan, names) for each in given]
        warnings.warn(
            "the state is of a graph that was changed since: its sources continue where they stood, everything else "
            "begins anew",
            PipegraphWarning,
            stacklevel=3,
        )
    found = restored(given, rank, world_size, plan, equal)
    if plan.seed is not None and found.seed != plan.seed:
        raise StateError(
            f"the state was saved with seed={found.seed}, graph {plan.graph_name!r} has seed={plan.seed}"
        )
    return found


def restored(
    given: Sequence[Any], rank: int, world_size: int, plan: Plan, equal_steps: bool = True
) -> Restored:
    """What this rank continues with from a state, or from the list of all ranks' states.

    At another world size what is left is dealt anew, where the cursors say what was consumed. Where they do not, the
    parts that are left continue whole, one or several to a rank: that is refused where ranks would differ in steps.

    Args:
        equal_steps: whether ranks must not differ in steps.

    Raises:
        StateError: not a loader's state, of another version or graph, or of a world size that this graph
            cannot resume from; says which stage is in the way.
    """
    first = given[0]
    saved = first["world_size"]
    if any(each["world_size"] != saved or each["seed"] != first["seed"] for each in given):
        raise StateError("the states of the list are of different runs: their world_size or seed differs")
    parts = {
        f"rank{part['stream'][0]}" if plan.elastic and part["stream"] else key: part
        for each in given
        for key, part in each.items()
        if key.startswith("rank") and isinstance(part, Mapping)
    }
    if saved == world_size:
        part = parts.get(f"rank{rank}") or _part_of_another(parts, rank, plan)
        of_part = part["epoch"], part["ledger"], _streams(part), part["chunks"], part["dealt"]
        iterators = {name: (step, snapshot) for name, (step, snapshot) in part["iterators"].items()}
        return Restored(first["seed"], *of_part, iterators)
    if not parts:
        raise StateError("the state has no part of any rank")
    part = parts.get(f"rank{rank}") or next(iter(parts.values()))
    found_in = first["seed"], part["epoch"], part["ledger"]
    steps = max(each["chunks"] for each in parts.values())
    if all(_is_whole(each) for each in parts.values()):
        # A whole epoch: there is nothing to deal anew.
        return Restored(*found_in, (Resume(stream=(rank, world_size)),), steps, steps)
    for stage in plan.running:
        if stage.traits.splits_itself:
            raise StateError(
                f"the state was saved with world_size={saved}, this loader runs with {world_size}, and what stage "
                f"{stage.name!r} reads may be split by the process's rank, in code that is not pipegraph's, so that no "
                f"other rank can continue one's part: resume with {saved}, or from the end of an epoch"
            )
    missing = [r for r in range(saved) if f"rank{r}" not in parts]
    found = _consumed(parts, saved, first["seed"], plan)
    taken = found if isinstance(found, dict) else {}
    if missing and not (plan.elastic and len(set(map(str, taken.values()))) == 1):
        raise StateError(_why_all_are_needed(plan, saved, world_size, taken, missing))
    if len({p["epoch"] for p in parts.values()}) > 1:
        raise StateError(
            "the ranks of these states stand in different epochs; save all ranks at the same step"
        )
    if taken:
        by_rank = [taken.get(f"rank{r}") or next(iter(taken.values())) for r in range(saved)]
        history = freeze(part["history"])
        if any(one != (0, "") for each in by_rank for one in each.values()):
            history = (*history, history_entry(saved, by_rank))
        stream = Resume(history=history, stream=(rank, world_size))
        return Restored(*found_in, (stream,), steps, steps)
    left = [stream for r in range(saved) for stream in _streams(parts[f"rank{r}"])]
    if equal_steps and len(left) % world_size:
        raise StateError(
            f"the state was saved with world_size={saved}, this loader runs with {world_size}: {found}, so that what "
            f"is left of the epoch can only continue in the {len(left)} parts that it was dealt in, which do not go "
            f"evenly into {world_size} ranks. Resume with {saved if saved == 1 else f'{saved} or 1'}, or, if ranks may "
            "differ in steps, give loader(equal_steps=False)"
        )
    return Restored(*found_in, tuple(left[rank::world_size]), steps, None)


def _of_changed_graph(state: Mapping[str, Any], plan: Plan, allow: Collection[str]) -> dict[str, Any]:
    """The state as one of this graph: where its sources stood, and nothing else."""
    sources = [stage.name for stage in plan.running if not stage.upstream]
    found = {**state, "digest": digests(plan)}
    for key, part in state.items():
        if not key.startswith("rank") or not isinstance(part, Mapping) or _is_whole(part):
            continue
        if part["later"]:
            raise StateError(
                "the graph was changed, and the state's ranks had taken over parts of others: load a state from the "
                "end of an epoch"
            )
        found[key] = {
            **part,
            "cursor": None,
            "begun": {name: part["steps"].get(name, 0) for name in sources},
            "dealt": None,
            "delivered": [],
            "history": [
                [
                    ranks,
                    {
                        name: counts.get(name, 0) if isinstance(counts, Mapping) else counts
                        for name in sources
                    },
                ]
                for ranks, counts in part["history"]
            ],
            "ledger": [0, []],
            "iterators": {
                name: each
                for name, each in part["iterators"].items()
                if name in sources and name not in allow
            },
        }
    return found


def _consumed(
    parts: Mapping[str, Any], saved: int, seed: int | None, plan: Plan
) -> dict[str, dict[str, Taken]] | str:
    """What each rank has consumed of each source, where what is left can be dealt anew; else why not."""
    first = next(iter(parts.values()))
    for each in parts.values():
        if each["later"] or tuple(each["stream"])[1:] != (saved,) or each["history"] != first["history"]:
            return "its ranks had taken over parts of others"
    try:
        return {
            key: consumed(plan, freeze(each["cursor"]), seed or 0, each["epoch"], each["begun"])
            for key, each in parts.items()
        }
    except Unknown as error:
        name = str(error)
        why = why_unknown(plan, plan.stages[name]) or "a batch or window of it was under way"
        return f"what was consumed is not known behind stage {name!r} ({why})"


def _part_of_another(parts: Mapping[str, Any], rank: int, plan: Plan) -> Any:
    """A rank's part if the state has only other ranks', as when one rank saves for all.

    Ranks of an elastic graph that have delivered as many samples stand at the same cursor.
    """
    missing = f"the state has no part for rank {rank}; it has: {', '.join(parts) or 'none'}"
    if not parts:
        raise StateError(missing)
    if not plan.elastic:
        raise StateError(
            f"{missing}. Because of stages {', '.join(map(repr, plan.inelastic))} each rank needs its own: "
            "save and load a state on every rank"
        )
    first = next(iter(parts.values()))
    shared = ("epoch", "cursor", "history", "begun")
    if any(part["later"] or any(part[key] != first[key] for key in shared) for part in parts.values()):
        raise StateError(f"{missing}, and these do not stand at the same step: load each rank's own")
    rank_of, world_size = first["stream"] or (None, None)
    if rank_of is None or f"rank{rank_of}" not in parts:
        raise StateError(f"{missing}, whose rank had taken over another's part: load each rank's own")
    return {**first, "stream": (rank, world_size), "ledger": [0, []], "iterators": {}}


def _streams(part: Mapping[str, Any]) -> tuple[Resume, ...]:
    if not part["stream"]:
        return ()
    own = decode_part((part["stream"], part["cursor"], part["history"], part["delivered"]))
    return (replace(own, begun=part["begun"]), *map(decode_part, part["later"]))


def _is_whole(part: Mapping[str, Any]) -> bool:
    begun = (
        part["cursor"] is not None or part["history"] or part["delivered"] or part["later"] or part["begun"]
    )
    return not begun and bool(part["stream"])


def _why_all_are_needed(
    plan: Plan, saved: int, world_size: int, taken: Mapping[str, Mapping[str, Taken]], missing: list[int]
) -> str:
    if not plan.elastic:
        why = f"the graph can only resume at the same size because of stages {', '.join(map(repr, plan.inelastic))}"
        sources = [plan.stages[name].source for name in plan.inelastic if name in plan.stages]
        users = [each for each in sources if each is not None and not each.resizable]
        if any(not each.traits.one_world_size for each in users):
            why += " (a source of your own resumes at any size once it has begin_run(epoch, history))"
    elif not taken:
        why = "its ranks had taken over parts of others"
    else:
        steps = {key: sum(count for count, _ in each.values()) for key, each in taken.items()}
        why = (
            "its ranks stand at different steps (" + ", ".join(f"{k} at {n}" for k, n in steps.items()) + ")"
        )
    return (
        f"the state was saved with world_size={saved}, this loader runs with {world_size}, and {why}; give "
        f"load_state_dict the list of all ranks' states (missing: ranks {', '.join(map(str, missing))})"
    )


def needs_its_place(state: Any) -> bool:
    """Whether the state of a pass that a trainer cuts short says what the next epoch's order is drawn from, such as a
    sampler's generator before this pass: then the next pass begins where this one, begun again, is broken off."""
    parts = [
        part for name, part in (state or {}).items() if name.startswith("rank") and isinstance(part, dict)
    ]
    return any(part["cursor"] is not None and part["iterators"] for part in parts)
