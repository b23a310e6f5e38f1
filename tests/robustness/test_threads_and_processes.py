"""Loaders where nobody expects them: in several threads, in forked and spawned processes, in copies."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from channel_states import wait_until

import pipegraph as pg
from pipegraph import forks, operators as ops


def make(n: int = 20, graph_name: str = "numbers") -> pg.Graph:
    graph = pg.Graph(graph_name, seed=1)
    graph.add(ops.FromSequence(range(n), order=pg.order.StridedOrder())).then(abs, workers=2).then(
        ops.Shuffle(4)
    ).then(ops.Batch(3, collate=list))
    return graph


def delivered(graph: pg.Graph) -> list[Any]:
    with graph.loader() as loader:
        return list(loader)


def in_child(work: Callable[[], str]) -> str:
    """What ``work`` returns, or its error's text, in a forked child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        child = os.fork()
    if not child:
        signal.alarm(30)  # a child that hangs fails the test, and does not stop it
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        answer = stream.read()
    assert os.waitpid(child, 0)[1] == 0
    return answer


def test_a_loader_that_a_forked_child_inherits_says_so_and_the_parents_continues() -> None:
    whole = delivered(make())
    with make().loader() as loader:
        passing = iter(loader)
        head = [next(passing)]
        assert in_child(lambda: str(next(passing))) == (
            "LoaderClosedError: this pass (epoch 0) is over: its threads stayed in the process that forked this one"
        )
        assert in_child(lambda: str(list(loader))) == (
            "LoaderClosedError: this loader runs in the process that forked this one; make another with "
            "graph.loader(...)"
        )
        assert in_child(lambda: str(loader.close())) == "None"  # type: ignore[func-returns-value]
        assert head + list(passing) == whole


def joined(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@contextmanager
def held_elsewhere(locks: list[Any]) -> Iterator[None]:
    """Another thread holds them: as a worker may at the very moment of a fork."""
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            holding.set()
            release.wait()

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert holding.wait(60)
    try:
        yield
    finally:
        release.set()
        joined(holder)


def locks_of(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Every lock that a thing of the project's leads to."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, type(threading.Lock()) | type(threading.RLock()) | threading.Condition):
        yield thing
    elif isinstance(thing, dict):
        for each in list(thing.values()):
            yield from locks_of(each, seen)
    elif isinstance(thing, list | tuple | deque):
        for each in list(thing):
            yield from locks_of(each, seen)
    elif type(thing).__module__.startswith("pipegraph."):
        for name in [*getattr(type(thing), "__slots__", ()), *getattr(thing, "__dict__", {})]:
            if name not in ("lock", "turn"):  # a waiter's own; the loader's, which is there already
                yield from locks_of(getattr(thing, name, None), seen)


@pytest.mark.parametrize("ask", ["close", "profile", "state_dict", "__repr__"])
def test_a_forked_child_waits_for_no_lock_that_a_thread_of_the_parent_holds(ask: str) -> None:
    graph = pg.Graph("forked")
    graph.add(ops.FromSequence(range(99))).then(broken_at_3, on_error=pg.Skip(), workers=2)
    with graph.loader() as loader:
        passing = iter(loader)
        head = [next(passing) for _ in range(10)]
        run = loader._crew.run  # type: ignore[union-attr]
        # No worker holds one of the locks and wants another: that thread would take them in another order.
        wait_until(run.terminal, lambda stats: stats.putters_waiting == 2)  # type: ignore[union-attr]
        locks = list({id(lock): lock for lock in locks_of(loader, set())}.values())
        assert len(locks) > 10
        with held_elsewhere(locks):
            answer = in_child(lambda: f"{ask}: {getattr(loader, ask)()}")
        assert answer.startswith(f"{ask}: ")
        if ask == "profile":
            assert "quarantined: 1" in answer
        assert [*head, *passing] == [x for x in range(99) if x != 3]


def test_what_a_child_shares_with_its_parent_is_free_there_whoever_held_it() -> None:
    graph = pg.Graph("shared", seed=1)
    rows = graph.add(ops.FromSequence(range(20), order=pg.order.StridedOrder(shuffle=True)))
    rows.then(abs).then(ops.Cache("1 MB"))
    whole = delivered(graph)
    locks = list(forks._locks)
    assert len(locks) > 5
    with held_elsewhere(locks):
        assert in_child(lambda: str(delivered(graph))) == str(whole)


def broken_at_3(x: int) -> int:
    if x == 3:
        raise ValueError(x)
    return x


def test_a_forked_child_makes_a_loader_of_its_own() -> None:
    whole = delivered(make())
    with make().loader() as loader:
        next(iter(loader))
        assert in_child(lambda: str(delivered(make()))) == str(whole)


def test_a_loader_that_has_not_begun_serves_the_child_as_well() -> None:
    loader = make().loader()
    whole = str(delivered(make()))
    assert in_child(lambda: str(list(loader))) == whole
    assert str(list(loader)) == whole
    loader.close()


def test_threads_that_share_a_pass_get_each_chunk_once() -> None:
    got: list[list[int]] = []
    with make(3000).loader() as loader:
        passing = iter(loader)
        threads = [threading.Thread(target=lambda: got.extend(passing)) for _ in range(3)]
        for thread in threads:
            thread.start()
        joined(*threads)
        assert loader.epoch == 1
    assert sorted(x for batch in got for x in batch) == list(range(3000))


def test_threads_that_begin_passes_of_their_own_end_each_others() -> None:
    ended: list[BaseException] = []

    def go() -> None:
        try:
            for _ in loader:
                pass
        except pg.errors.LoaderClosedError as error:
            ended.append(error)

    with make(600).loader() as loader:
        threads = [threading.Thread(target=go) for _ in range(4)]
        for thread in threads:
            thread.start()
        joined(*threads)
        assert all("a new pass over the loader has begun" in str(error) for error in ended)
        # One that was ended before it delivered anything has consumed nothing.
        assert 1 <= loader.epoch <= 4 and len(list(loader)) == 200


def test_closing_from_another_thread_ends_the_loop_with_the_reason() -> None:
    begun = threading.Event()
    loader = make(10**6).loader()

    def close() -> None:
        assert begun.wait(60)
        loader.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(pg.errors.LoaderClosedError, match="the loader was closed"):
        for _ in loader:
            begun.set()
    joined(closer)


def test_states_and_profiles_are_taken_from_other_threads_while_batches_come() -> None:
    graph = pg.Graph("unordered")
    graph.add(ops.FromSequence(range(900))).then(abs, workers=3, ordered=False).then(ops.Batch(3))
    with graph.loader() as loader:
        passing = iter(loader)
        next(passing)
        looked = threading.Thread(
            target=lambda: [(loader.state_dict(), str(loader.profile())) for _ in range(50)]
        )
        looked.start()
        assert sum(1 for _ in passing) == 299
        joined(looked)
        assert loader.profile().samples == 900


def test_two_loaders_over_one_graph_do_not_disturb_each_other() -> None:
    graph = make()
    whole = delivered(graph)
    with graph.loader() as one, graph.loader() as other:
        assert list(zip(one, other, strict=True)) == [(batch, batch) for batch in whole]


def test_a_loader_inside_a_stage_of_another() -> None:
    def total(x: int) -> int:
        return x + sum(map(sum, delivered(make(6))))

    graph = pg.Graph("outer")
    graph.add(ops.FromIterable(range(4))).then(total, workers=2)
    assert delivered(graph) == [15, 16, 17, 18]


def test_a_loader_inside_the_worker_processes_of_a_dataloader() -> None:
    class Inner(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            with make().loader() as loader:
                yield from loader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        batches = list(torch.utils.data.DataLoader(Inner(), num_workers=1, batch_size=None))
    assert batches == delivered(make())


async def later(x: int) -> int:
    return x + 1


def everything(folder: Path) -> pg.Graph:
    graph = pg.Graph("everything", seed=2)
    one = graph.add(ops.FromSequence(range(30), order=pg.order.StridedOrder())).then(abs)
    one = one.then(ops.Cache(1000)).then(later, workers=2).then(ops.Shuffle(5))
    other = graph.add(ops.ListFiles(folder)).then(ops.Load()).then(len).then(ops.Filter(bool))
    graph.add(ops.Mix([1, 2], stop="all"), one, other).then(ops.Batch(4))
    return graph


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda graph: pickle.loads(pickle.dumps(graph))])
def test_a_graph_is_copied_and_pickled_also_after_it_has_run(
    tmp_path: Path, copied: Callable[[pg.Graph], pg.Graph]
) -> None:
    (tmp_path / "a.txt").write_bytes(b"1")
    graph = everything(tmp_path)
    whole = [batch.tolist() for batch in delivered(graph)]
    twin = copied(graph)
    twin.add(ops.FromIterable([1]), name="another")
    assert "another" not in graph.stages
    with twin.loader("batch") as loader, graph.loader() as old:
        assert loader.state_dict()["digest"] == old.state_dict()["digest"]
        assert [batch.tolist() for batch in loader] == whole


def test_shard_operators_are_copied_and_pickled(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    graph = pg.Graph("shards")
    graph.add(ops.ShardSelect(tmp_path / "a.jsonl")).then(ops.Load())
    whole = delivered(graph)
    assert delivered(copy.deepcopy(graph)) == whole == delivered(pickle.loads(pickle.dumps(graph)))


def test_a_profile_and_a_chunk_travel_to_other_processes() -> None:
    with make().loader() as loader:
        chunks = list(loader.chunks())
        profile = loader.profile()
    assert pickle.loads(pickle.dumps(profile)) == profile
    twin = pickle.loads(pickle.dumps(chunks[0]))
    assert twin.data == chunks[0].data and twin.keys == chunks[0].keys


def test_a_half_consumed_loader_that_is_dropped_is_gone() -> None:
    loader = make(1000).loader()
    passing = iter(loader)
    next(passing)
    gone = weakref.ref(loader)
    del loader, passing
    gc.collect()
    assert gone() is None


def test_an_iterator_outlives_the_name_of_its_loader() -> None:
    passing = iter(make().loader())
    gc.collect()
    assert list(passing) == delivered(make())
