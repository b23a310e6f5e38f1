"""Shared memory without names, and messages in it."""

import gc
import os
import socket

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.engine.process.pickling import APART
from pipegraph.engine.process.segments import SPARE, Arena
from pipegraph.engine.process.wire import Port
from pipegraph.testing.outcome import fingerprint


@pytest.fixture
def ports(no_leaks):
    pair = [Port(each) for each in socket.socketpair()]
    yield pair
    for port in pair:
        port.close()
    gc.collect()


def carried(ports, tree):
    ports[0].send(tree)
    return ports[1].receive()


LEAVES = st.one_of(
    st.integers(),
    st.text(max_size=5),
    st.binary(max_size=10),
    st.integers(0, 3000).map(lambda n: np.arange(n, dtype=np.float32)),
    st.integers(0, 3000).map(lambda n: torch.arange(n, dtype=torch.int64).flip(0)),
    st.sampled_from(
        [
            np.arange(24.0).reshape(4, 6)[:, ::2],
            np.array(["a", None], object),
            torch.ones(3, 4, dtype=torch.bfloat16).T,
            torch.empty(0, 3),
            torch.tensor(1.5),
            torch.tensor([1 + 2j]).conj(),
            np.zeros((0, 2)),
            np.int64(3),
            b"x" * (1 << 17),
        ]
    ),
)
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)


@settings(max_examples=100)
@given(trees=st.lists(TREES, max_size=3))
def test_any_tree_arrives_as_it_was(trees):
    pair = [Port(each) for each in socket.socketpair()]
    try:
        for tree in trees:
            assert fingerprint(carried(pair, tree)) == fingerprint(tree)
            assert fingerprint(carried(pair[::-1], tree)) == fingerprint(tree)
    finally:
        for port in pair:
            port.close()


@settings(max_examples=50)
@given(trees=st.lists(TREES, min_size=2, max_size=4))
def test_messages_that_wait_together_arrive_one_by_one(trees):
    """Also those that bring new segments: their descriptors come with other messages' bytes."""
    ours, theirs = (Port(each) for each in socket.socketpair())
    try:
        for tree in trees:
            ours.send(tree)
        for tree in trees:
            assert fingerprint(theirs.receive()) == fingerprint(tree)
        assert not theirs.holds
    finally:
        ours.close()
        theirs.close()


def test_what_arrives_can_be_written_to(ports):
    found = carried(ports, [np.zeros(APART), torch.zeros(APART), np.zeros(2), torch.zeros(2)])
    for each in found:
        each[0] = 1
        assert each[0] == 1


def test_a_message_that_is_kept_is_never_overwritten(ports):
    kept = [carried(ports, np.full(10_000, number))[10:] for number in range(5)]
    for number in range(5, 20):
        carried(ports, np.full(10_000, number))
        carried(ports[::-1], "done with it")
    assert [int(each[0]) for each in kept] == [0, 1, 2, 3, 4]


def test_segments_are_used_again_once_nobody_reads_them(ports):
    for number in range(20):
        found = carried(ports, torch.full((10_000,), float(number)))
        assert found[0] == number
        del found
        carried(ports[::-1], "done with it")
    assert ports[0]._arena.made <= 2


def test_slabs_are_named_and_not_written(ports):
    slab = ports[0].slab(1 << 16)
    batch = torch.frombuffer(slab.numpy()[:], dtype=torch.float32)[: 100 * 20].view(100, 20)
    batch[:] = torch.arange(20)
    written = ports[0].send({"image": batch, "flipped": batch[10:20, 5:15], "label": torch.arange(3)})
    found = ports[1].receive()
    assert written == 0
    assert torch.equal(found["image"], batch)
    assert torch.equal(found["flipped"], batch[10:20, 5:15])
    found["image"][0, 0] = 77
    assert batch[0, 0] == 77  # it is the same memory


def test_an_arena_keeps_a_bounded_number_of_free_segments():
    arena = Arena()
    taken = [arena.take(100) for _ in range(SPARE + 5)]
    dropped = [arena.give_back(segment) for segment in taken]
    assert sum(each is not None for each in dropped) == 5
    assert arena.take(100).number in {each.number for each in taken}
    arena.close()


def mapped():
    with open("/proc/self/maps") as maps:
        return sum("memfd:pipegraph" in line for line in maps)


def test_the_memory_of_batches_that_were_kept_and_dropped_is_unmapped(no_leaks):
    graph = pg.Graph("kept")
    batches = graph.add(ops.FromSequence(range(480))).then(ops.Batch(2))
    batches.then(lambda batch: np.full(10_000, len(batch)), backend="process")
    with graph.loader() as loader:
        passing = iter(loader)
        kept = [next(passing) for _ in range(120)]
        held = mapped()
        kept.clear()
        assert sum(1 for _ in passing) == 120
        assert mapped() < 60 < 120 <= held


def test_the_end_of_the_other_side_is_noticed(ports):
    ports[0].close()
    with pytest.raises(EOFError):
        ports[1].receive()


def test_nothing_of_a_connection_stays_open(no_leaks):
    pair = [Port(each) for each in socket.socketpair()]
    kept = carried(pair, np.ones(100_000))
    for port in pair:
        port.close()
    assert kept.sum() == 100_000
    del kept
    assert not [fd for fd in os.listdir("/proc/self/fd") if "memfd:pipegraph" in _target(fd)]


def _target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""
