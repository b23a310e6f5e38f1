"""Every error policy on every kind of stage and backend: nothing is lost, nothing comes twice, and the ledger, the
budget and the state agree with what was delivered.
"""

import json
import logging
from dataclasses import dataclass

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.contracts import RowOperator
from pipegraph.engine.stage.budgets import exceeded
from pipegraph.errors import GraphError
from pipegraph.stage_spec import Edge, StageSpec
from tests.engine.breaking_stages import Broken, collect

pytestmark = pytest.mark.usefixtures("no_leaks")

ITEMS, BAD = range(12), (3, 7)
POLICIES = [pg.Skip(1), pg.Skip(), pg.Retry(1, then=pg.Skip())]

# -- kinds of stages ---------------------------------------------------------------------------------


def work(x):
    if x in BAD:
        raise Broken(x)
    return 10 * x


class Samples:
    """A dataset that cannot read some samples."""

    def __len__(self):
        return len(ITEMS)

    def __getitem__(self, i):
        return work(i) // 10


class Chunks(pg.Operator):
    """Without bundles."""

    def process(self, chunk):
        return chunk.replace(work(chunk.data))


class Stateful(Chunks):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Rows(RowOperator):
    def process(self, chunk):
        return chunk.replace(work(chunk.data))

    def begin_batch(self, chunk):
        return chunk, [None] * len(chunk.data)

    def do_row(self, batch, index):
        batch[1][index] = work(batch[0].data[index])

    def end_batch(self, batch, kept):
        return batch[0].select(kept, [batch[1][row] for row in kept])


def plus_one(x):
    return x + 1


def on_first(batch):
    return [work(batch[0])]


def at_work(operator):
    return lambda node, **options: node.then(operator(), name="work", **options)


def in_a_chain(node, **options):
    """Three stages that may share a process: the one in the middle fails."""
    placement = {name: options[name] for name in ("workers", "backend", "capacity") if name in options}
    node = node.then(lambda x: x, name="first", **placement).then(work, name="work", **options)
    return node.then(plus_one, name="last", **placement)


def rows_of_batches(node, **options):
    return node.then(ops.Batch(4, collate=list)).then(Rows(), name="work", **options)


def of_a_route(node, **options):
    route = node.then(ops.Route(lambda x: work(x) % 2, 2), name="work", **options)
    return node.graph.add(ops.Concat(), *route)


def below_a_cache(node, **options):
    return node.then(ops.Cache("1 MB")).then(work, name="work", **options)


def then_batched(node, **options):
    return node.then(work, name="work", **options).then(ops.Batch(4, collate=list))


def whole_batches(node, **options):
    return node.then(ops.Batch(1, collate=list)).then(on_first, name="work", **options)


@dataclass(frozen=True)
class Kind:
    """A kind of stages.

    Attributes:
        add: adds the stage 'work' behind a node, with options; None: it is the source.
        done: what it makes of a sample.
        below: what the stages below make of its result.
        keeps: whether it cannot try an item again.
        batches: where samples are put together, if they are: "above" or "below" it.
    """

    add: object
    done: object = lambda x: 10 * x
    below: object = lambda y: y
    keeps: bool = False
    batches: str = ""


def same(x):
    return x


KINDS = {
    "source": Kind(None, done=same),
    "function": Kind(at_work(lambda: ops.Map(work))),
    "operator": Kind(at_work(Chunks)),
    "stateful": Kind(at_work(Stateful), keeps=True),
    "row operator": Kind(at_work(Rows)),
    "rows": Kind(rows_of_batches, batches="above"),
    "chain": Kind(in_a_chain, below=plus_one),
    "below a cache": Kind(below_a_cache),
    "then batched": Kind(then_batched, batches="below"),
    "filter": Kind(at_work(lambda: ops.Filter(lambda x: work(x) >= 0)), same),
    "expand": Kind(at_work(lambda: ops.FlatMap(lambda x: [work(x)]))),
    "regroup": Kind(at_work(lambda: ops.Batch(1, collate=on_first)), keeps=True),
    "route": Kind(of_a_route, same),
    "batch": Kind(whole_batches),
}


def spec_of(given):
    return StageSpec("work", ops.Map(abs), (Edge("source"),), on_error=given)


def graph_of(kind, given, **options):
    graph = pg.Graph("g", seed=1)
    if kind.add is None:
        graph.add(ops.FromSequence(Samples()), name="work", on_error=given, **options)
    else:
        kind.add(graph.add(ops.FromSequence(ITEMS), name="source"), on_error=given, **options)
    return graph


# -- what must come of them --------------------------------------------------------------------------


def expected(kind, given):
    """The samples delivered, the failed samples in the ledger, and the one whose failure ends the pass, or None."""
    delivered, listed = [], []
    for x in ITEMS:
        if x not in BAD:
            delivered.append(kind.below(kind.done(x)))
            continue
        if exceeded(spec_of(given).skip.budget, len(listed) + 1, x + 1):
            break
        listed.append(x)
    else:
        return delivered, listed, None
    if kind.batches == "above":
        del delivered[len([y for y in ITEMS if y < x // 4 * 4 and y not in BAD]) :]
    if kind.batches == "below":
        del delivered[len(delivered) // 4 * 4 :]
    return delivered, listed, x


def samples(got):
    """The samples of what a loader gave."""
    return [x for item in got for x in (item if isinstance(item, list) else [item])]


def run(graph, **options):
    """The samples delivered, the ledger, and the sample whose failure was raised, or None."""
    got, error, loader = collect(graph, **options)
    if error is not None and not isinstance(error, Broken):
        raise error
    return samples(got), ledger_of(loader), None if error is None else error.args[0]


def ledger_of(loader):
    profile = loader.profile()
    assert {entry.stage for entry in profile.quarantined} <= {"work"}
    assert profile.quarantined_count == len(profile.quarantined)
    return [entry.key for entry in profile.quarantined]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("given", POLICIES, ids=repr)
def test_a_policy_on_a_kind_of_stages(name, given, caplog):
    kind = KINDS[name]
    if kind.keeps and spec_of(given).retry.times:
        with pytest.raises(GraphError, match=r"stage 'work': Retry\(\) tries one item again"):
            graph_of(kind, given).plan()
        return
    with caplog.at_level(logging.WARNING, "pipegraph"):
        whole = run(graph_of(kind, given, backend="inline"))
    assert whole == expected(kind, given)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "was left out" in said and f"on_error={given!r}" in said
    assert run(graph_of(kind, given, workers=3, capacity=1)) == whole
    if whole[2] is not None:
        return
    got, listed, _ = run(graph_of(kind, given, workers=3, ordered=False))
    assert (sorted(got), sorted(listed)) == (sorted(whole[0]), whole[1])
    for stop in (1, len(whole[0]) // (4 if kind.batches else 1) - 1):
        resumes(lambda **options: graph_of(kind, given, **options), max(0, stop), whole)


def resumes(make, stop, whole):
    """A state after ``stop`` items, loaded into another loader, continues the data and the ledger."""
    with make(backend="inline").loader() as loader:
        first = samples([item for _, item in zip(range(stop), loader, strict=False)])
        state = json.loads(json.dumps(loader.state_dict()))
    with make(workers=2).loader() as loader:
        loader.load_state_dict(state)
        rest = list(loader)
        assert (first + samples(rest), ledger_of(loader), None) == whole


@pytest.mark.parametrize("name", ["source", "function", "stateful", "rows", "chain", "below a cache"])
def test_a_policy_in_processes(name):
    kind, given = KINDS[name], pg.Skip(1)
    assert run(graph_of(kind, given, workers=2, backend="process")) == expected(kind, given)
