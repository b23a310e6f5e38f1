"""Every error policy on every kind of stage and backend: nothing is lost, nothing comes twice, and the ledger, the
budget and the state agree with what was delivered.

``POLICIES`` has built-in policies and some of a user's own. A new policy joins by one line.
"""

import io
import json
import logging
from dataclasses import dataclass

import pytest
import torch
from PIL import Image

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.capabilities import RowOperator
from pipegraph.engine.stage.budgets import exceeded
from pipegraph.error_policy import ErrorPolicy, policy
from pipegraph.errors import DataError, GraphError
from tests.engine.breaking_stages import Broken, collect

pytestmark = pytest.mark.usefixtures("no_leaks")

ITEMS, BAD = range(12), (3, 7)

# -- policies ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Default(ErrorPolicy):
    """A result in a failed sample's place."""

    value: object = None
    budget: int | float | None = None
    substitutes = "output"
    became = "was replaced by the default"

    def instead(self, failed, error, neighbours):
        return [failed.replace(self.value)]


@dataclass(frozen=True)
class Spare(Default):
    """A sample in a failed one's place, on which the stage does its work."""

    substitutes = "input"
    became = "was replaced by a spare"


@dataclass(frozen=True)
class LeaveOut(ErrorPolicy):
    """Leaves out what fails, and ends the pass at the first sample from ``until`` on that does."""

    until: int = 1_000
    budget: int | float | None = None
    drops = True
    became = "is gone"

    def instead(self, failed, error, neighbours):
        return None if failed.keys[0] < self.until else error


GOOD = object()
"""Any sample on which the stage does not fail."""

# (policy, the value that it puts in a failed sample's place)
POLICIES = [
    (pg.Skip(1), None),
    (pg.Replace(budget=1), GOOD),
    (pg.Replace(), GOOD),
    (pg.Retry(1, then=pg.Skip()), None),
    (Default(-5), -5),
    (Default(-5, budget=1), -5),
    (pg.Retry(1, then=Default(-5)), -5),
    (Spare(100), 100),
    (LeaveOut(), None),
    (LeaveOut(until=BAD[1]), None),
]
IN_PROCESSES = [pg.Replace(), Default(-5, budget=1), Spare(100), LeaveOut(until=BAD[1])]
"""Those that also run there: one of each kind, for a process costs more than a thread."""

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

    def do_row(self, batch, index, sample):
        batch[1][index] = work(batch[0].data[index] if sample is None else sample)

    def put_row(self, batch, index, result):
        batch[1][index] = result

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
    return node.graph.add(ops.Merge(), *route)


def below_a_cache(node, **options):
    return node.then(ops.Cache("memory", "1 MB")).then(work, name="work", **options)


def then_batched(node, **options):
    return node.then(work, name="work", **options).then(ops.Batch(4, collate=list))


def whole_batches(node, **options):
    return node.then(ops.Batch(1, collate=list)).then(on_first, name="work", **options)


@dataclass(frozen=True)
class Kind:
    """A kind of stages.

    Attributes:
        add: adds the stage 'work' behind a node, with options; None: it is the source.
        may: what its policies may do.
        done: what it makes of a sample.
        below: what the stages below make of its result.
        keeps: whether it cannot try an item again.
        batches: where samples are put together, if they are: "above" or "below" it.
    """

    add: object
    may: frozenset[str] = frozenset({"drops", "input", "output"})
    done: object = lambda x: 10 * x
    below: object = lambda y: y
    keeps: bool = False
    batches: str = ""


def same(x):
    return x


DROPS = frozenset({"drops"})
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
    "filter": Kind(at_work(lambda: ops.Filter(lambda x: work(x) >= 0)), DROPS, same),
    "expand": Kind(at_work(lambda: ops.FlatMap(lambda x: [work(x)])), DROPS),
    "regroup": Kind(at_work(lambda: ops.Batch(1, collate=on_first)), DROPS, keeps=True),
    "route": Kind(of_a_route, DROPS, same),
    "batch": Kind(whole_batches, DROPS),
}


def graph_of(kind, given, **options):
    graph = pg.Graph("g", seed=1)
    if kind.add is None:
        graph.add(ops.FromSequence(Samples()), name="work", on_error=given, **options)
    else:
        kind.add(graph.add(ops.FromSequence(ITEMS), name="source"), on_error=given, **options)
    return graph


# -- what must come of them --------------------------------------------------------------------------


def expected(kind, given, put):
    """The samples delivered, the failed samples in the ledger, and the one whose failure ends the pass, or None."""
    outcome, delivered, listed = policy(given).last, [], []
    for x in ITEMS:
        if x not in BAD:
            delivered.append(kind.below(kind.done(x)))
            continue
        if exceeded(outcome.budget, len(listed) + 1, x + 1):
            break
        listed.append(x)
        if isinstance(outcome, LeaveOut) and x >= outcome.until:
            break
        if put is GOOD:
            delivered.append(GOOD)
        elif outcome.substitutes:
            delivered.append(kind.below(kind.done(put) if outcome.substitutes == "input" else put))
    else:
        return delivered, listed, None
    if kind.batches == "above":
        del delivered[len([y for y in ITEMS if y < x // 4 * 4 and (y not in BAD or outcome.substitutes)]) :]
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


def refused(kind, given):
    """The error at the plan if a policy may not do there what it says, or None."""
    does = policy(given).last.substitutes or "drops"
    if kind.keeps and policy(given).retries:
        return r"Retry\(\) tries one item again"
    word, why = (
        type(policy(given).last).__name__,
        "works for one-to-one|replaces a single sample",
    )
    return None if does in kind.may else rf"{word}\(\) ({why})"


def agree(kind, given, put, found):
    """Whether a run has given what it must."""
    delivered, listed, ended = expected(kind, given, put)
    assert found[1:] == (listed, ended)
    assert len(found[0]) == len(delivered)
    for got, want in zip(found[0], delivered, strict=True):
        good = [kind.below(kind.done(x)) for x in ITEMS if x not in BAD]
        assert got in good if want is GOOD else got == want


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("given", "put"), POLICIES, ids=[repr(given) for given, _ in POLICIES])
def test_a_policy_on_a_kind_of_stages(name, given, put, caplog):
    kind = KINDS[name]
    if (why := refused(kind, given)) is not None:
        with pytest.raises(GraphError, match=f"stage 'work': {why}"):
            graph_of(kind, given).plan()
        return
    with caplog.at_level(logging.WARNING, "pipegraph"):
        whole = run(graph_of(kind, given, backend="inline"))
    agree(kind, given, put, whole)
    (said,) = [record.getMessage() for record in caplog.records]
    assert policy(given).last.became in said and f"on_error={given!r}" in said
    assert run(graph_of(kind, given, workers=3, capacity=1)) == whole
    if whole[2] is None:
        got, listed, _ = run(graph_of(kind, given, workers=3, ordered=False))
        assert (sorted(got), sorted(listed)) == (sorted(whole[0]), whole[1])
    for stop in (1, len(whole[0]) // (4 if kind.batches else 1) - 1):
        resumes(lambda **options: graph_of(kind, given, **options), max(0, stop), whole)


def resumes(make, stop, whole):
    """A state after ``stop`` items, loaded into another loader, continues the data, the ledger and the budget."""
    with make(backend="inline").loader() as loader:
        first = samples([item for _, item in zip(range(stop), loader, strict=False)])
        state = json.loads(json.dumps(loader.state_dict()))
    with make(workers=2).loader() as loader:
        loader.load_state_dict(state)
        rest, ended = [], None
        try:
            rest += loader
        except Broken as error:
            ended = error.args[0]
        assert (first + samples(rest), ledger_of(loader), ended) == whole


@pytest.mark.parametrize("name", ["source", "function", "stateful", "rows", "chain", "below a cache"])
@pytest.mark.parametrize("given", IN_PROCESSES, ids=repr)
def test_a_policy_in_processes(name, given):
    kind = KINDS[name]
    if refused(kind, given) is None:
        whole = run(graph_of(kind, given, backend="inline"))
        assert run(graph_of(kind, given, workers=2, backend="process")) == whole


# -- what a policy of one's own may not do -------------------------------------------------------------


@dataclass(frozen=True)
class Gives(ErrorPolicy):
    """Whatever it is told to."""

    given: object = None
    substitutes = "output"

    def instead(self, failed, error, neighbours):
        return self.given(failed) if callable(self.given) else self.given


class Nothing(Gives):
    """Says that it puts nothing in a failed item's place."""

    substitutes = ""


def of_another(failed):
    other = failed.replace(-5)
    other.lineages = (("source", 0),)
    return [other]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (Gives(), r"on_error=Gives\(given=None\): instead\(\) returned a NoneType, which needs drops = True"),
        (Nothing([]), r"instead\(\) returned a list, which needs substitutes = \"input\" or \"output\""),
        (
            Gives(lambda failed: failed),
            r"returned a Chunk, which needs an iterable of chunks, as in \[failed.repl",
        ),
        (
            Gives([-5]),
            r"instead\(\) gave -5, which is no chunk of the failed sample: give failed.replace\(data\)",
        ),
        (Gives(of_another), r"instead\(\) gave <Chunk .*, which is no chunk of the failed sample"),
    ],
)
def test_a_policy_that_does_not_keep_to_its_facts_is_refused_by_name(given, text):
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(ITEMS)).then(work, name="work", on_error=given)
    got, error, _ = collect(graph)
    assert got == [0, 10, 20]
    with pytest.raises(GraphError, match=text) as caught:
        raise error
    assert "for Broken: 3" in caught.value.__notes__[0]
    assert caught.value.__notes__[1] == "pipegraph: stage 'work', sample 3 at position 3, epoch 0"


def test_an_error_of_a_policy_itself_ends_the_pass_with_its_name():
    def fails(failed):
        raise KeyError("no default")

    graph = pg.Graph("g")
    graph.add(ops.FromSequence(ITEMS)).then(work, name="work", on_error=Gives(fails))
    _, error, _ = collect(graph)
    assert type(error) is KeyError and "raised by on_error=Gives(given=" in error.__notes__[0]


def test_a_fact_that_nobody_knows_is_refused():
    class Typo(ErrorPolicy):
        substitutes = "outputs"

    graph = pg.Graph("g")
    with pytest.raises(
        GraphError, match="stage 'work': Typo.substitutes must be 'input', 'output' or '', got 'out"
    ):
        graph.add(ops.FromSequence(ITEMS)).then(work, name="work", on_error=Typo())


def test_a_policy_without_instead_ends_the_pass_after_its_retries():
    class Again(ErrorPolicy):
        retries = 2

    tries = []

    def fail(x):
        tries.append(x)
        raise Broken(x)

    graph = pg.Graph("g")
    graph.add(ops.FromSequence(ITEMS)).then(fail, on_error=Again(), backend="inline")
    _, error, _ = collect(graph)
    assert type(error) is Broken and tries == [0, 0, 0]


def test_the_first_substitute_on_which_the_stage_does_not_fail_is_taken_and_without_one_the_error_is_raised():
    class Several(Gives):
        substitutes = "input"

    graph = pg.Graph("g")
    several = Several(lambda failed: [failed.replace(x) for x in (3, 100, 200)])
    graph.add(ops.FromSequence(ITEMS)).then(work, on_error=several)
    assert collect(graph)[0][:5] == [0, 10, 20, 1000, 40]
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(ITEMS)).then(work, on_error=Several(lambda failed: [failed.replace(3)]))
    got, error, _ = collect(graph)
    assert got == [0, 10, 20] and type(error) is Broken and error.args == (3,)


@pytest.mark.parametrize("substitutes", ["input", "output"])
def test_stages_that_change_a_substitute_change_no_other_one(substitutes):
    class Constant(Gives):
        pass

    Constant.substitutes = substitutes
    constant = {"x": [100]}

    def fails_first(sample):
        if isinstance(sample, int):
            raise Broken(sample)
        sample["x"].append(1)
        return sample

    def below(sample):
        sample["x"].append(2)
        return sample

    graph = pg.Graph("g")
    node = graph.add(ops.FromSequence(range(3)))
    policy = Constant(lambda failed: [failed.replace(constant)])
    node.then(fails_first, on_error=policy, backend="inline").then(below, backend="inline")
    got, error, _ = collect(graph)
    made = [100, 1, 2] if substitutes == "input" else [100, 2]
    assert error is None and got == [{"x": made}] * 3 and constant == {"x": [100]}


def test_a_result_is_not_taken_for_that_of_a_stage_that_would_do_the_work_of_the_next_one_too():
    def graph(given):
        graph = pg.Graph("g")
        node = graph.add(ops.FromSequence([b"no image"] * 3))
        node = node.then(ops.DecodeImage(4), name="decode", on_error=given)
        node.then(ops.Normalize([0.5] * 3, [0.5] * 3), name="normalize")
        return graph

    black = Default(torch.zeros(4, 4, 3, dtype=torch.uint8))
    assert graph(pg.Skip()).plan().stages["normalize"].bypassed is not None
    assert graph(black).plan().stages["normalize"].bypassed is None
    got, error, _ = collect(graph(black))
    assert error is None and all((image == -1).all() for image in got)


@pytest.mark.parametrize(
    "placement", [{"backend": "inline"}, {"workers": 2, "timeout": 60}, {"backend": "process"}]
)
def test_a_result_takes_the_place_of_a_row(placement):
    image = io.BytesIO()
    Image.new("RGB", (8, 8), (255, 0, 0)).save(image, "PNG")
    encoded = [b"broken" if i in (0, 4, 5) else image.getvalue() for i in range(6)]
    data = [{"image": each, "label": i} for i, each in enumerate(encoded)]

    def graph(value):
        graph = pg.Graph("g")
        node = graph.add(ops.FromSequence(data)).then(ops.Batch(2))
        node.then(ops.DecodeImage(4), name="work", on_error=Default(value), **placement)
        return graph

    black = torch.zeros(4, 4, 3, dtype=torch.uint8)
    got, error, loader = collect(graph({"image": black, "label": -1}))
    assert error is None and [batch["label"].tolist() for batch in got] == [[-1, 1], [2, 3], [-1, -1]]
    assert torch.cat([batch["image"] for batch in got]).amax((1, 2, 3)).tolist() == [0, 255, 255, 255, 0, 0]
    assert ledger_of(loader) == [0, 4, 5]
    for wrong, text in [
        ({"image": black}, r"must have the fields .*'label'.*, got \['image'\]"),
        (
            {"image": black[:1], "label": -1},
            r"must be torch.uint8 of shape \(4, 4, 3\), got torch.uint8 of \(1, 4, 3\)",
        ),
    ]:
        _, error, _ = collect(graph(wrong))
        with pytest.raises(DataError, match=text):
            raise error
        assert "raised by on_error=Default(value=" in error.__notes__[0]


def test_rows_that_take_no_results_are_refused_by_name():
    class NoResults(Rows):
        put_row = RowOperator.put_row

    graph = pg.Graph("g")
    node = graph.add(ops.FromSequence(ITEMS)).then(ops.Batch(4))
    node.then(NoResults(), name="work", on_error=Default(-5))
    with pytest.raises(
        GraphError, match=r"stage 'work': Default\(\) gives results for rows .* NoResults has no put_row"
    ):
        graph.plan()


def test_a_users_policy_in_the_sidecar():
    graph = graph_of(KINDS["function"], Default(-5, budget=1), backend="inline")
    assert run(graph, isolate=True) == run(graph)
