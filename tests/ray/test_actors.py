"""Stages whose operators live in Ray actors: the same data, errors and policies as everywhere, and no actor left."""

import logging
import os
import threading
import time

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.contracts import RowOperator
from pipegraph.errors import GraphError, StageTimeoutError
from pipegraph.testing.outcome import placed, run_pass

pytestmark = pytest.mark.usefixtures("cluster")


def pipeline(fn, items=range(20), workers=2, backend="ray", **options):
    graph = pg.Graph("g", seed=3)
    source = graph.add(ops.FromSequence(items))
    graph.add(ops.Map(fn), source, name="work", workers=workers, backend=backend, **options)
    return graph


def outcome(graph, **options):
    with graph.loader(**options) as loader:
        return run_pass(loader)


def test_every_kind_of_stage_delivers_what_it_delivers_inline():
    def draw(x, rng):
        return {"key": x["key"], "x": float(rng.random()), "t": torch.rand(3)}

    def make():
        graph = pg.Graph("g", seed=3)
        items = [{"key": f"k{i}", "v": np.full(2000, i)} for i in range(23)]
        read = graph.add(ops.FromSequence(items, shuffle=True), name="read")
        drawn = read.then(ops.Map(draw), name="draw")
        twice = drawn.then(ops.FlatMap(lambda x: [x] * (x["x"] < 0.8)), name="twice")
        twice.then(ops.Batch(4), name="batch")
        return graph

    assert outcome(placed(make(), "ray", 1)) == outcome(placed(make(), "inline", 1))


def test_what_comes_back_may_be_written_to_and_kept():
    def make(x):
        return {"small": np.full(3, x), "large": np.full(300_000, x), "tensor": torch.full((300_000,), x)}

    with pipeline(make, range(6)).loader() as loader:
        kept = []
        for sample in loader:
            for each in sample.values():
                each[0] += 100
            kept.append(sample)
    for x, sample in enumerate(kept):
        for each in sample.values():
            assert each[0] == x + 100
            assert each[1:].tolist() == [x] * (len(each) - 1)


def test_what_a_function_is_given_may_be_written_to():
    def change(sample):
        sample["array"][0] = -1
        sample["tensor"][0] = -1
        return sample

    items = [{"array": np.arange(50_000), "tensor": torch.arange(50_000)} for _ in range(3)]
    graph = pg.Graph("g")
    copies = graph.add(ops.FromIterable(lambda: iter(items)))
    copies.then(change, name="work", backend="ray")
    with graph.loader() as loader:
        for sample in loader:
            assert sample["array"][0] == -1 == sample["tensor"][0]
    assert items[0]["array"][0] == 0


def test_functions_and_samples_may_hold_references_and_handles_of_ray(cluster):
    @cluster.remote(num_cpus=0)
    class Names:
        def of(self, x):
            return f"n{x}"

    table, names = cluster.put(np.arange(100) ** 2), Names.remote()

    def work(sample):
        found = cluster.get([table, sample, names.of.remote(int(cluster.get(sample)))])
        return {"square": int(found[0][found[1]]), "name": found[2], "made": cluster.put(found[1] + 1)}

    with pipeline(work, [cluster.put(x) for x in range(4)]).loader() as loader:
        found = [(each["square"], each["name"], cluster.get(each["made"])) for each in loader]
    assert found == [(x * x, f"n{x}", x + 1) for x in range(4)]


def test_an_error_arrives_as_itself_with_its_traceback_and_the_samples_before_it():
    def fail(x):
        if x == 7:
            raise KeyError("seven")
        return x

    with pipeline(fail).loader() as loader:
        found = []
        with pytest.raises(KeyError, match="seven") as caught:
            found.extend(loader)
    assert found == list(range(7))
    assert "in fail" in str(caught.value.__cause__)
    assert "sample 7 at position 7" in caught.value.__notes__[-1]


def test_what_is_skipped_is_in_the_ledger():
    graph = pipeline(lambda x: 1 // (x - 7), on_error=pg.Skip(1))
    with graph.loader() as loader:
        assert len(list(loader)) == 19
        assert [each.key for each in loader.profile().quarantined] == [7]


def test_a_sample_that_ends_its_actor_is_blamed_and_the_others_are_delivered():
    graph = pipeline(lambda x: os._exit(3) if x == 13 else x, on_error=pg.Skip(1))
    with graph.loader() as loader:
        assert list(loader) == [x for x in range(20) if x != 13]
        (lost,) = loader.profile().quarantined
    assert lost.key == 13
    assert "the worker's actor has died: The actor is dead because its worker process has died" in lost.error


def test_a_row_of_a_batch_that_ends_its_actor_is_left_out():
    class Rows(RowOperator):
        """Adds one to each row; row 5 ends the process."""

        def begin_batch(self, chunk):
            return chunk, chunk.data.clone()

        def do_row(self, batch, index):
            if batch[0].data[index] == 5:
                os._exit(3)
            batch[1][index] += 1

        def end_batch(self, batch, kept):
            chunk, made = batch
            return chunk.select(kept, made[list(kept)])

        def process(self, chunk):
            raise AssertionError

    graph = pg.Graph("g")
    batches = graph.add(ops.FromSequence(range(16))).then(ops.Batch(8))
    batches.then(Rows(), name="work", backend="ray", on_error=pg.Skip(1))
    with graph.loader() as loader:
        assert [batch.tolist() for batch in loader] == [[1, 2, 3, 4, 5, 7, 8], list(range(9, 17))]


def test_an_item_that_takes_too_long_fails_with_its_stack():
    def hang(x):
        if x == 13:
            time.sleep(100)
        return x

    with pipeline(hang, timeout=1.0).loader() as loader:
        found = []
        with pytest.raises(
            StageTimeoutError, match=r"longer than timeout=1 s; its actor was ended"
        ) as caught:
            found.extend(loader)
    assert found == list(range(13))
    assert "in hang" in "".join(caught.value.__notes__)


class Failing:
    def __reduce__(self):
        raise TypeError("a lock cannot be sent")


def test_what_cannot_be_sent_is_named_at_the_start():
    held = Failing()
    graph = pipeline(lambda x: held)
    with (
        graph.loader() as loader,
        pytest.raises(GraphError, match="stage 'work': the operator cannot be sent"),
    ):
        list(loader)


def test_what_an_operator_raises_as_it_opens_is_raised_at_the_start():
    class Opens(pg.Operator):
        def open(self, context):
            raise OSError("no such device")

        def process(self, chunk):
            return chunk

    graph = pg.Graph("g")
    graph.add(ops.FromSequence([1])).then(Opens(), name="work", backend="ray")
    with graph.loader() as loader, pytest.raises(OSError, match="no such device") as caught:
        list(loader)
    assert "stage 'work': worker 0 could not be started" in "".join(caught.value.__notes__)


def test_actors_that_there_is_no_room_for_join_later_and_nobody_waits_for_them(cluster):
    graph = pipeline(lambda x: (x, os.getpid()), range(40), workers=3, backend=pg.Ray({"num_cpus": 8}))
    with graph.loader(epochs=2) as loader:
        found = list(loader)
        assert [x for x, _ in found] == list(range(40))
        assert len({pid for _, pid in found}) <= 2


def test_an_actor_that_is_only_starting_is_said_to_need_nothing(monkeypatch, caplog, tmp_path):
    """The actor opens its operator only once the log has said something: a reader of a pipe waits for its writer."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    class OpensOnceSaid(pg.Operator):
        def open(self, context):
            pipe.read_bytes()

        def process(self, chunk):
            return chunk

    class Says(logging.Handler):
        def emit(self, record):
            if "Ray actor" in record.getMessage():
                pipe.write_bytes(b"")

    monkeypatch.setattr("pipegraph.engine.actors.actor_host.PATIENCE_S", 0.0)
    monkeypatch.setattr(logging.getLogger("pipegraph"), "handlers", [Says()])
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(3))).then(OpensOnceSaid(), name="work", backend=pg.Ray({"num_cpus": 0}))
    assert outcome(graph).chunks
    (said,) = (each.message for each in caplog.records if "Ray actor" in each.message)
    assert said.startswith("stage 'work': the Ray actor of worker 0 is starting: ")


def test_a_resource_that_no_node_has_is_refused():
    graph = pipeline(lambda x: x, backend=pg.Ray({"num_gpu": 1}))
    with (
        graph.loader() as loader,
        pytest.raises(
            GraphError, match=r"stage 'work': resources=\{'num_gpu': 1\}: no node .* mean 'num_gpus'"
        ),
    ):
        next(iter(loader))


def test_actors_that_decode_batches_read_the_files(tmp_path):
    cv2 = pytest.importorskip("cv2")
    for number in range(10):
        cv2.imwrite(str(tmp_path / f"{number}.png"), np.full((40, 50, 3), 20 * number, np.uint8))
    here = {"workers": 2, "backend": "ray"}
    graph = pg.Graph("g", seed=3)
    files = graph.add(ops.ListFiles(tmp_path, shuffle=True)).then(ops.Load(), name="load", **here)
    crop = ops.RandomResizedCrop()
    files.then(ops.Batch(4)).then(ops.DecodeImage(32, crop=crop, flip=0.5), name="decode", **here)
    assert graph.plan().stages["load"].within == "decode"
    assert outcome(graph) == outcome(placed(graph, "inline", 1))


def test_stages_with_other_resources_have_actors_of_their_own():
    graph = pipeline(lambda x: x)
    graph["work"].then(lambda x: x, name="more", workers=2, backend=pg.Ray({"num_cpus": 2}))
    assert "more: in 2 Ray actors of its own" in str(graph.plan())


def test_no_rank_waits_for_anothers_stragglers_and_each_sample_is_made_once(tmp_path):
    held = str(tmp_path / "held")
    os.mkfifo(held)

    def work(x):
        if x == 1:  # of rank 1
            with open(held, "rb"):  # until somebody opens it to write
                pass
        return x

    with (
        pipeline(work).loader(rank=0, world_size=2) as first,
        pipeline(work).loader(rank=1, world_size=2) as second,
    ):
        straggler = iter(second)
        waiting = threading.Thread(target=lambda: found.append(next(straggler)))
        found = []
        waiting.start()
        assert list(first) == list(range(0, 20, 2))
        assert not found
        with open(held, "wb"):
            waiting.join()
        assert [*found, *straggler] == list(range(1, 20, 2))


def test_actors_have_their_stages_environment():
    graph = pipeline(
        lambda x: os.environ["OF_THE_STAGE"],
        range(2),
        backend=pg.Ray(runtime_env={"env_vars": {"OF_THE_STAGE": "yes"}}),
    )
    with graph.loader() as loader:
        assert list(loader) == ["yes", "yes"]


def test_two_loaders_of_one_graph_at_once():
    graph = pipeline(lambda x: 2 * x, workers=1)
    with graph.loader() as one, graph.loader() as other:
        assert list(zip(one, other, strict=True)) == [(2 * x, 2 * x) for x in range(20)]


def test_ctrl_c_ends_the_pass_and_leaves_no_actor(live_actors):
    def interrupted():
        with pipeline(lambda x: x).loader() as loader:
            next(iter(loader))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not live_actors()


def test_a_broken_off_pass_and_the_next_one():
    with pipeline(lambda x: x).loader(epochs=2) as loader:
        for x in loader:
            if x == 3:
                break
        assert list(loader) == list(range(20))


def test_no_actor_is_left(live_actors):
    for ends in (list, lambda loader: next(iter(loader))):
        with pipeline(lambda x: x).loader() as loader:
            ends(loader)
            assert len(live_actors()) == 2
        assert not live_actors()
