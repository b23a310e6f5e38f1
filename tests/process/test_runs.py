"""Neighbouring process stages run in the same processes, and nobody can tell but by the plan and the speed."""

import os
import re
import threading
import time

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError, StageTimeoutError, WorkerDiedError
from pipegraph.testing import assert_resumes_exactly
from pipegraph.testing.outcome import fingerprint
from tests.process.process_pipelines import tell_that_it_hangs

__all__ = ["tell_that_it_hangs"]

pytestmark = pytest.mark.usefixtures("no_leaks")


def add_key(x):
    return {"key": f"k{x}", "x": x, "pid": os.getpid()}


def drop_key(sample, rng):
    return sample["x"], float(rng.random()), float(torch.rand(())), (sample["pid"], os.getpid())


def numbers(item):
    return item[:3]


def pipeline(*functions, source="thread", items=range(40), backend="process", options=(), **common):
    graph = pg.Graph("g", seed=3)
    node = graph.add(ops.FromSequence(items), name="source", workers=2, backend=source, **common)
    for index, fn in enumerate(functions):
        own = options[index] if index < len(options) else {}
        node = node.then(fn, name=f"s{index}", workers=2, backend=backend, **common, **own)
    return graph


def chunks(graph, **options):
    with graph.loader(**options) as loader:
        return [(chunk.keys, chunk.data) for chunk in loader.chunks()]


def left_out(loader):
    return [(each.key, each.stage) for each in loader.profile().quarantined]


@pytest.mark.parametrize("source", ["thread", "process"])
def test_a_run_works_in_one_process_and_delivers_the_same(source):
    graph = pipeline(add_key, drop_key, source=source)
    first = "source" if source == "process" else "s0"
    assert [s.name for s in graph.plan().stages[first].followers] == (
        ["s0", "s1"] if source == "process" else ["s1"]
    )
    text = " ".join(str(graph.plan()).split())
    assert f"s1: its work is done in the processes of {first!r}" in text
    assert "2 in all: for more, raise workers= of every stage" in text
    assert all(here == there != os.getpid() for _, (_, _, _, (here, there)) in chunks(graph))
    plain = pipeline(add_key, drop_key, numbers, backend="thread")
    assert chunks(pipeline(add_key, drop_key, numbers, source=source)) == chunks(plain)


@pytest.mark.parametrize(
    "options",
    [
        ({}, {"ordered": False}),
        ({"on_error": pg.Skip(1)}, {"on_error": pg.Skip(1)}),
        ({"on_error": pg.Retry(1)}, {}),
        ({}, {"timeout": 600.0}),
    ],
    ids=["unordered", "two policies", "retry", "timeouts"],
)
def test_stages_that_differ_stay_apart(options):
    graph = pipeline(add_key, drop_key, options=options)
    assert graph.plan().stages["s1"].bypassed is None
    assert len(chunks(graph)) == 40


def test_what_another_stage_reads_too_is_no_run():
    graph = pipeline(add_key)
    node = graph["s0"]
    one, two = (
        node.then(fn, workers=2, backend="process", name=name) for fn, name in ((len, "a"), (len, "b"))
    )
    graph.add(ops.Zip(), one, two)
    assert not graph.plan().stages["s0"].followers


def test_a_failure_is_its_own_stages_and_names_the_key_that_another_has_added():
    def fail(sample):
        if sample["x"] == 7:
            raise ValueError("seven")
        return sample

    for source in ("thread", "process"):
        with pytest.raises(ValueError, match="seven") as caught:
            chunks(pipeline(add_key, fail, drop_key, source=source))
        assert any("stage 's1', sample 'k7' at position 7" in text for text in caught.value.__notes__)


@pytest.mark.parametrize("batched", [False, True])
def test_skip_leaves_out_what_failed_in_its_stage_and_calls_no_function_twice(tmp_path, batched):
    def count(x):
        (tmp_path / f"{int(np.ravel(x)[0])}-{time.monotonic_ns()}").touch()
        return x

    def fail(x):
        if int(np.ravel(x)[0]) % 10 == 0:
            raise ValueError(int(np.ravel(x)[0]))
        return x

    graph = pg.Graph("g")
    node = graph.add(ops.FromSequence(range(40)))
    node = node.then(ops.Batch(2)) if batched else node
    node = node.then(count, name="count", workers=2, backend="process")
    node = node.then(fail, name="fail", workers=2, backend="process", on_error=pg.Skip(0.5))
    node.then(lambda x: x, name="last", workers=2, backend="process")
    assert [stage.name for stage in graph.plan().stages["count"].followers] == ["fail", "last"]
    with graph.loader(equal_steps=False) as loader:
        found = torch.cat([torch.as_tensor(x).reshape(-1) for x in loader]).tolist()
        stages = loader.profile().stages
        lost = [position for each in loader.profile().quarantined for position in [each.position]]
    assert sorted(found + lost) == list(range(40))
    items = 20 if batched else 40
    assert len(list(tmp_path.iterdir())) == items
    assert {each.stage for each in loader.profile().quarantined} == {"fail"}
    assert (stages["count"].items, stages["fail"].items, stages["last"].items) == (
        items,
        items - 4,
        items - 4,
    )
    assert (stages["count"].failed, stages["fail"].failed, stages["fail"].dropped) == (0, 4, 4)
    assert (stages["count"].samples, stages["last"].samples) == (40, len(found))


def test_the_budget_of_a_run_is_that_of_its_stage():
    def fail(sample):
        raise ValueError("all of them")

    with pytest.raises(ValueError) as caught:
        chunks(pipeline(add_key, fail, options=({}, {"on_error": pg.Skip(3)})))
    assert any("stage 's1': failure 4 of" in text for text in caught.value.__notes__)


def test_the_state_of_a_run_is_that_of_its_stages_apart():
    def fail(sample):
        if sample["x"] % 4 == 1:
            raise ValueError
        return sample["x"]

    states = []
    for backend in ("process", "thread"):
        graph = pipeline(add_key, fail, backend=backend, options=({}, {"on_error": pg.Skip(0.9)}))
        with graph.loader() as loader:
            iterator = iter(loader)
            for _ in range(10):
                next(iterator)
            states.append(loader.state_dict())
    assert states[0]["rank0"] == states[1]["rank0"]
    resumed = pipeline(add_key, fail, options=({}, {"on_error": pg.Skip(0.9)}))
    with resumed.loader() as loader:
        loader.load_state_dict(states[1])
        assert list(loader)[:3] == [14, 15, 16]


@pytest.mark.parametrize("source", ["thread", "process"])
def test_a_death_is_blamed_on_the_stage_and_row_at_work(source):
    def die(sample):
        if sample["x"] in (5, 6, 21):
            os._exit(3)
        return sample

    graph = pipeline(add_key, die, drop_key, source=source, options=({}, {"on_error": pg.Skip(3)}))
    with graph.loader() as loader:
        assert [item[0] for item in loader] == [x for x in range(40) if x not in (5, 6, 21)]
        assert left_out(loader) == [("k5", "s1"), ("k6", "s1"), ("k21", "s1")]
    with pytest.raises(WorkerDiedError, match=r"stage 's1': the worker's process called exit\(3\)"):
        chunks(pipeline(add_key, die, drop_key, source=source))


def test_a_deadline_is_blamed_on_the_stage_and_row_at_work(tmp_path, tell_that_it_hangs):
    calls = tmp_path / "calls"

    def hang(sample):
        if sample["x"] == 5:
            with calls.open("a") as file:
                file.write("one\n")
            tell_that_it_hangs()
            threading.Event().wait()
        return sample

    options = ({}, {"on_error": pg.Skip(1)})
    with pipeline(add_key, hang, drop_key, options=options, timeout=0.5).loader() as loader:
        assert [item[0] for item in loader] == [x for x in range(40) if x != 5]
        assert left_out(loader) == [("k5", "s1")]
    assert calls.read_text() == "one\n"
    with pytest.raises(StageTimeoutError, match="stage 's1': an item took longer than timeout=0.5 s"):
        chunks(pipeline(add_key, hang, drop_key, timeout=0.5))


def test_each_stage_has_its_own_figures():
    def slow(x):
        end = time.monotonic() + 0.004
        while time.monotonic() < end:
            pass
        return x

    with pipeline(lambda x: x, slow, lambda x: np.zeros(x + 1)).loader() as loader:
        list(loader)
        stages = loader.profile().stages
        text = str(loader.profile())
    assert [stages[f"s{i}"].items for i in range(3)] == [40, 40, 40]
    assert stages["s1"].within == stages["s2"].within == "s0"
    assert stages["s2"].service_mean_s < stages["s1"].service_mean_s >= 0.004
    assert (stages["s0"].nbytes, stages["s2"].nbytes) == (0, sum(8 * n for n in range(1, 41)))
    assert "in s0" in text


def test_the_slowest_stage_of_a_run_is_named():
    def spin(ms):
        def work(x):
            end = time.thread_time() + ms / 1000
            while time.thread_time() < end:
                pass
            return x

        return work

    with pipeline(spin(0.1), spin(6), spin(2), items=range(200)).loader() as loader:
        list(loader)
        profile = loader.profile()
    assert profile.bottleneck == "s1"
    assert re.search(r"'s1' holds.* its 2 workers are busy .* with this stage, while", profile.conclusion)


def test_an_operator_that_cannot_be_sent_is_named():
    import threading

    lock = threading.Lock()
    with pytest.raises(GraphError, match=r"stage 's1'.*cannot be sent to another process.*lock"):
        chunks(pipeline(add_key, lambda x: lock))


def test_what_cannot_be_sent_is_named_by_the_shortest_way_to_it():
    import threading

    class Data:
        def __init__(self):
            self.me, self.lock = self, threading.Lock()

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return index

    graph = pg.Graph("g")
    graph.add(ops.FromSequence(Data()), backend="process")
    with pytest.raises(GraphError, match=r"process: FromSequence\.dataset\.lock \(a lock\): "):
        chunks(graph)


def test_a_result_that_cannot_be_sent_leaves_the_others_alone():
    def odd(sample):
        return (y for y in ()) if sample["x"] == 3 else sample["x"]

    graph = pipeline(add_key, odd, options=({}, {"on_error": pg.Skip(1)}))
    with graph.loader() as loader:
        assert list(loader) == [x for x in range(40) if x != 3]


@pytest.mark.parametrize("source", ["thread", "process"])
def test_a_run_resumes_exactly(source):
    def graph():
        made = pipeline(
            add_key, lambda sample, rng: (sample["x"], rng.random()), source=source, items=range(12)
        )
        made["s1"].then(ops.Batch(5))
        return made

    assert_resumes_exactly(graph)


def test_large_arrays_between_the_stages_do_not_cross():
    def large(x):
        return np.full(1 << 20, x, np.uint8)

    def small(array):
        return int(array[0]) + array.nbytes

    found = [data for _, data in chunks(pipeline(large, small))]
    assert found == [x + (1 << 20) for x in range(40)]
    assert fingerprint(found) == fingerprint([x + (1 << 20) for x in range(40)])
