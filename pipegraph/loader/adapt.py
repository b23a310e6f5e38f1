"""Adapts a state to a graph that has changed since: what of it holds for the graph there is now. Pure.

A cursor mirrors the graph above its edge, so a state notes how its graph was wired (``Plan.wiring``): for each stage
what it is, where in its cursors those of its inputs lie, and what it reads from. With that the cursor of the
old output is taken apart into those of the stages, and a cursor of the new output is put together from these:

* a source that is in both graphs resumes at its step, a new one begins at its start;
* a one-to-one stage holds nothing, so it may be changed, added or left out freely;
* any other stage that was not changed keeps what it held; one that was changed, or is new, begins anew where its
  input stands, which for a window or a bucket is where the oldest sample that had not left came in;
* a changed operator with a state of its own, if it is still of the same class, is given the state that was saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pipegraph.chunk import Cursor
from pipegraph.engine.stage.cursors import earlier, freeze
from pipegraph.errors import StateError
from pipegraph.loader.delivered import check_state
from pipegraph.planning.kind import UNTOLD, Former
from pipegraph.planning.plan import Plan, Wiring

Given = list[tuple[str, Cursor]]
"""Stages of the old graph that are in the new one too, with cursors of their outputs."""


class _Differences(NamedTuple):
    """Between the graph of a state and the one there is."""

    changed: list[str]
    missing: list[str]
    added: list[str]
    moved: list[str]


def adapted_all(state: Any, plan: Plan, allow: Collection[str]) -> tuple[Any, list[str]]:
    """As :func:`adapted`, also of the list of all ranks' states."""
    if not isinstance(state, list | tuple):
        check_state(state)
        return adapted(state, plan, allow)
    found = [adapted_all(each, plan, allow) for each in state]
    return [each for each, _ in found], found[0][1] if found else []


def adapted(state: Mapping[str, Any], plan: Plan, allow: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The state as one of this graph, and in words what continues and what begins anew.

    Raises:
        StateError: a stage that is not allowed to differ does, or one that differs cannot be carried over.
    """
    old = state.get("graph")
    if not isinstance(old, Mapping):
        raise StateError("the state does not say how its graph was wired: allow= needs one that does")
    ours = plan.wiring()
    unknown = [name for name in allow if name not in old and name not in ours]
    if unknown:
        known = ", ".join(map(repr, dict.fromkeys([*ours, *old])))
        raise StateError(
            f"allow: neither graph has a stage {', '.join(map(repr, unknown))}; they have {known}"
        )
    differ = _differences(old, ours, str(state["digest"].get("(output)", "")), plan, allow)
    carry = _Carry(plan, old, ours, differ, str(state["digest"]["(output)"]).rpartition(":")[0])
    made = dict(state)
    for key, part in state.items():
        if key.startswith("rank") and isinstance(part, Mapping):
            made[key] = carry.part(part)
    made["digest"], made["graph"] = plan.digests(), ours
    return made, carry.words()


GONE = " (of an open window or bucket it comes again what was delivered; samples that a state of it held are lost)"


def _known(node: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a stage another one; not whether it lies between a ``Route`` and its ``Merge``."""
    return node["class"], node["parameters"], freeze(node["cursor"][0])


def _skipped(name: str, wired: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The nearest stages above (or this one) that are in the other graph too; itself where nothing is above."""
    if name in other or not wired[name]["from"]:
        return [name]
    return [found for up in wired[name]["from"] for found in _skipped(up, wired, other)]


def _differences(
    old: Mapping[str, Any], ours: Wiring, output: str, plan: Plan, allow: Collection[str]
) -> _Differences:
    both = [name for name in ours if name in old]
    changed = [name for name in both if _known(old[name]) != _known(ours[name])]
    missing = [name for name in old if name not in ours]
    added = [name for name in ours if name not in old]
    named = set(allow)
    words = [f"stage {name!r} has other parameters" for name in changed if name not in named]
    words += [f"stage {name!r} of the state is not in the graph" for name in missing if name not in named]
    words += [f"stage {name!r} is not in the state" for name in added if name not in named]

    def reads(wired: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> set[str]:
        return {found for up in names for found in _skipped(up, wired, other)} - named

    for name in both:
        before, now = reads(old, ours, old[name]["from"]), reads(ours, old, ours[name]["from"])
        if before != now and name not in named:
            words.append(f"stage {name!r} reads from {_list(now)} instead of {_list(before)}")
    ended, ends = output.rpartition(":")[0], plan.described_output().stage
    if ended in old and reads(old, ours, [ended]) != reads(ours, old, [ends]):
        words.append(f"it delivered from {ended!r}, this graph from {ends!r}")
    if words:
        raise StateError(
            f"the state is of another graph than {plan.graph_name!r}: {'; '.join(words)}. Name what may differ in "
            f"allow= (given: {_list(allow)})"
        )
    moved = [name for name in both if old[name]["from"] != ours[name]["from"] and name not in changed]
    return _Differences(changed, missing, added, moved)


def _list(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"


class _Carry:
    """Takes cursors of the old graph apart and puts those of the new one together."""

    def __init__(
        self, plan: Plan, old: Mapping[str, Any], ours: Wiring, differ: _Differences, output: str
    ) -> None:
        self._plan = plan
        self._old, self._ours = old, ours
        self._differ = differ
        self._output = output
        self._stages = {stage.name: stage for stage in plan.described()}
        self._found: dict[str, Cursor] = {}

    def part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """A rank's part of the state."""
        if part["delivered"] or any(rows for *_, rows in part["later"]):
            self._check_paths()
        kept = {name for name in self._old if name in self._ours}
        same = kept - set(self._differ.changed)
        counts, *entries = part["ledger"]
        return {
            **part,
            "dealt": part["dealt"] if part["dealt"] == part["chunks"] else None,
            "cursor": self._cursor(part["cursor"]),
            "history": self._history(part["history"]),
            "later": [
                [place, self._cursor(cursor), self._history(history), rows]
                for place, cursor, history, rows in part["later"]
            ],
            "ledger": [[each for each in counts if each[0] in kept], *entries],
            **{
                key: {name: part[key][name] for name in part[key] if name in same}
                for key in ("iterators", "beginnings")
            },
        }

    def _has_same_inputs(self, name: str) -> bool:
        """Whether a stage reads from the same stages in both graphs, those aside that are in one of them only."""
        if name not in self._old or name not in self._ours:
            return False
        before = [_skipped(up, self._old, self._ours) for up in self._old[name]["from"]]
        return before == [_skipped(up, self._ours, self._old) for up in self._ours[name]["from"]]

    def _history(self, history: Sequence[Any]) -> list[Any]:
        """What was consumed at other world sizes, of each source that there is now."""
        before = [name for name, node in self._old.items() if not node["from"]]
        now = [name for name, node in self._ours.items() if not node["from"]]
        found = []
        for ranks, counts in history:
            each = counts if isinstance(counts, Mapping) else dict.fromkeys(before, counts)
            found.append([ranks, {name: each.get(name, 0) for name in now}])
        return found

    def _check_paths(self) -> None:
        """Below completion-order stages samples are known by the inputs of fan-ins that they came through."""
        for name, node in {**self._old, **self._ours}.items():
            if len(node["from"]) > 1 and not self._has_same_inputs(name):
                raise StateError(
                    f"stage {name!r}: the inputs of a fan-in must not change below a stage with ordered=False; load "
                    "a state from the end of an epoch"
                )

    def _cursor(self, cursor: Any) -> Cursor:
        if cursor is None or self._output not in self._old:
            return None
        self._found = {}
        frozen = freeze(cursor)
        self._walk(self._output, frozen)
        return self._find(self._plan.described_output().stage, list(self._common(self._output, frozen)))

    # -- the old graph -------------------------------------------------------------------------

    def _walk(self, name: str, cursor: Cursor) -> None:
        """Note the lowest cursor of every stage's output that a restart would ask for."""
        if name not in self._found or earlier(cursor, self._found[name]):
            self._found[name] = cursor
        for up, each in self._apart(name, cursor):
            self._walk(up, each)

    def _apart(self, name: str, cursor: Cursor) -> Given:
        """The stages that a stage of the old graph reads from, each with the cursor at which that restarts."""
        node = self._old[name]
        ups = node["from"]
        at, marked = node["cursor"]
        if cursor is not None and marked:
            cursor = cursor[0]
        if cursor is None:
            return [(up, None) for up in ups]
        if at == UNTOLD:
            raise StateError(
                f"stage {name!r} keeps its place in its own way: to change the graph here its class must say where in "
                "its cursors those of its inputs lie (inputs_in), and how it begins behind them (begin_at)"
            )
        if isinstance(at, list):
            return list(zip(ups, cursor[slice(*at)], strict=False))
        return [(up, cursor if at is None else cursor[at]) for up in ups]

    def _common(self, name: str, cursor: Cursor) -> Iterator[tuple[str, Cursor]]:
        """The nearest stages above (or this one) that are in the new graph too."""
        if name in self._ours:
            yield name, cursor
        else:
            for up, each in self._apart(name, cursor):
                yield from self._common(up, each)

    # -- the new graph -------------------------------------------------------------------------

    def _find(self, name: str, given: Given) -> Cursor:
        """The cursor of a stage's output, where ``given`` is what its reader read from in the old graph."""
        if name not in self._old:
            ups = [self._find(up, given) for up in self._ours[name]["from"]]
            return self._together(name, ups, None)
        for index, (found, cursor) in enumerate(given):
            if found == name:
                del given[index]  # the next input that reads from the same stage has its own
                return self._build(name, cursor)
        return self._build(name, self._found.get(name))

    def _build(self, name: str, cursor: Cursor) -> Cursor:
        if cursor is None:
            return None
        apart = self._apart(name, cursor)
        given = [pair for up, each in apart for pair in self._common(up, each)]
        ups = [self._find(up, given) for up in self._ours[name]["from"]]
        before, now = self._old[name], self._ours[name]
        if ups and all(up is None for up in ups) and any(each is not None for _, each in apart):
            return None  # nothing of what it had come from is there any more
        at, is_at = (node["cursor"][0] for node in (before, now))
        sliced = isinstance(at, list) and isinstance(is_at, list)
        fits = before["class"] == now["class"] and (sliced or at == is_at)
        return self._together(name, ups, cursor if fits else None)

    def _together(self, name: str, ups: list[Cursor], cursor: Cursor) -> Cursor:
        """A cursor of a stage's output; ``cursor`` is the one that it had, None where it begins anew."""
        if cursor is None and ups and all(up is None for up in ups):
            return None
        stage, marked = self._stages[name], name in self._old and self._old[name]["cursor"][1]
        former = Former(cursor, name in self._differ.changed, marked, self._has_same_inputs(name))
        return stage.kind.carry(stage, ups, former)

    # -- words ---------------------------------------------------------------------------------

    def words(self) -> list[str]:
        """What is kept and what begins anew, stage by stage."""
        found = [f"{name!r} is gone{GONE}" for name in self._differ.missing]
        for name in (*self._differ.changed, *self._differ.added):
            added = name in self._differ.added
            other = added or self._old[name]["class"] != self._ours[name]["class"]
            stage = self._stages[name]
            found.append(f"{name!r} {stage.kind.becomes(added, other)}")
        return found + [
            f"{name!r} reads from {_list(self._ours[name]['from'])}" for name in self._differ.moved
        ]
