"""Planted bottlenecks, without threads: the facts come from an exact simulation of queues in a row."""

import random

import pytest

from pipegraph.measurements import StageProfile
from pipegraph.profile.bottleneck import (
    CONSUMER,
    EdgeFacts,
    find_bottleneck,
    find_cause,
    find_lock_holder,
)


def line(costs, workers, capacity, items=400):
    """Busy shares and edges of a chain of stages with ordered queues, worked out item by item.

    Source: the recursion of tandem queues with blocking after service. ``costs[i](rng)`` is the service
    time of stage i; the last one is the training loop.
    """
    rng = random.Random(7)
    stages = len(costs)
    names = [f"s{i}" for i in range(stages - 1)] + [CONSUMER]
    free = [[0.0] * workers[i] for i in range(stages)]  # when each worker can take its next item
    left = [[] for _ in range(stages)]  # when item n left stage i (was put into its queue)
    taken = [[] for _ in range(stages)]  # when item n was taken by stage i
    busy, starved, blocked = [0.0] * stages, [0.0] * stages, [0.0] * stages
    for item in range(items):
        arrived = 0.0
        for stage in range(stages):
            worker = min(range(workers[stage]), key=lambda w: free[stage][w])
            ready = free[stage][worker]
            start = max(ready, arrived)
            if item and start < taken[stage][-1]:
                start = taken[stage][-1]
            starved[stage] += start - ready
            taken[stage].append(start)
            cost = costs[stage](rng)
            busy[stage] += cost
            done = start + cost
            put = max(done, left[stage][-1] if item else 0.0)
            # Room: item (n - capacity) must have been taken by the next stage. Items reach a stage in
            # order, so that is known already for all but the items this very loop still has to move.
            if stage + 1 < stages and item >= capacity:
                put = max(put, taken[stage + 1][item - capacity])
            blocked[stage] += put - done
            free[stage][worker] = put
            left[stage].append(put)
            arrived = put
    elapsed = left[-1][-1]
    share = [workers[i] * elapsed for i in range(stages)]
    edges = [
        EdgeFacts(names[i], names[i + 1], starved[i + 1] / share[i + 1], blocked[i] / share[i])
        for i in range(stages - 1)
    ]
    return {names[i]: busy[i] / share[i] for i in range(stages)}, edges


def test_a_planted_bottleneck_is_named_wherever_it_stands_and_however_many_workers_there_are():
    draw = random.Random(1)
    for case in range(300):
        stages = draw.randint(2, 7)
        planted = draw.randrange(stages)
        workers = [draw.randint(1, 4) for _ in range(stages - 1)] + [1]
        costs = []
        for stage in range(stages):
            each = 1.0 if stage == planted else draw.uniform(0.05, 0.75)  # per worker: utilisation
            mean = each * workers[stage]
            spread = draw.choice([0.0, 0.2])
            costs.append(lambda rng, m=mean, s=spread: m * rng.uniform(1 - s, 1 + s))
        busy, edges = line(costs, workers, capacity=draw.randint(4, 16))
        expected = CONSUMER if planted == stages - 1 else f"s{planted}"
        assert expected == find_bottleneck(busy, edges), (case, busy, edges)


def test_a_fan_in_is_traced_to_the_branch_it_waits_for():
    busy = {"read": 0.1, "fast": 0.1, "slow": 1.0, "zip": 0.05, CONSUMER: 0.2}
    edges = [
        EdgeFacts("read", "fast", 0.0, 0.3),
        EdgeFacts("read", "slow", 0.0, 0.6),
        EdgeFacts("fast", "zip", 0.0, 0.9),
        EdgeFacts("slow", "zip", 0.95, 0.0),
        EdgeFacts("zip", CONSUMER, 0.8, 0.0),
    ]
    assert find_bottleneck(busy, edges) == "slow"


def test_of_two_branches_it_is_the_one_that_keeps_their_source_waiting():
    busy = {"read": 0.41, "first": 0.6, "second": 0.96, "zip": 0.0, CONSUMER: 0.5}
    edges = [
        EdgeFacts("read", "first", 0.35, 0.1),
        EdgeFacts("read", "second", 0.02, 0.38),
        EdgeFacts("first", "zip", 0.6, 0.0),
        EdgeFacts("second", "zip", 0.4, 0.0),
        EdgeFacts("zip", CONSUMER, 0.5, 0.0),
    ]
    assert find_bottleneck(busy, edges) == "second"


@pytest.mark.parametrize(
    ("read", "decode", "train", "expected"),
    [(0.6, 0.1, 0.3, "read"), (0.1, 0.6, 0.3, "decode"), (0.1, 0.2, 0.7, CONSUMER)],
)
def test_inline_stages_take_turns_so_the_longest_turn_is_named(read, decode, train, expected):
    edges = [
        EdgeFacts("read", "decode", read, 0.0, inline=True),
        EdgeFacts("decode", CONSUMER, read + decode, 0.0, inline=True),
    ]
    assert expected == find_bottleneck({"read": read, "decode": decode, CONSUMER: train}, edges)


def working(busy, cores, coreless=None):
    """Stages of one worker each: how much it was busy, ran, and had no core."""
    lacked = coreless or {}
    return {
        name: StageProfile(1, busy=busy[name], running=cores[name], coreless=lacked.get(name, 0.0))
        for name in busy
    }


@pytest.mark.parametrize(
    ("bottleneck", "busy", "cores", "wake_s", "expected"),
    [
        ("light", {"heavy": 2.0, "light": 1.0}, {"heavy": 0.95, "light": 0.02}, 4e-3, "heavy"),
        ("heavy", {"heavy": 2.0, "light": 0.1}, {"heavy": 0.97, "light": 0.02}, 4e-3, "heavy"),
        # It waits for a store or sleeps: threads continue as soon as they are woken.
        ("light", {"heavy": 0.9, "light": 1.0}, {"heavy": 0.9, "light": 0.02}, 5e-5, None),
        # It runs all the time that it is busy.
        ("heavy", {"heavy": 1.0, "light": 0.1}, {"heavy": 0.98, "light": 0.02}, 4e-3, None),
        # Nobody runs: it is not the lock that threads wait for.
        ("light", {"heavy": 0.1, "light": 1.0}, {"heavy": 0.05, "light": 0.01}, 4e-3, None),
        (CONSUMER, {"heavy": 1.0}, {"heavy": 0.9}, 4e-3, None),
    ],
)
def test_a_stage_that_waits_for_the_interpreter_lock_is_not_blamed(bottleneck, busy, cores, wake_s, expected):
    assert find_lock_holder(bottleneck, working(busy, cores), wake_s) == expected


def test_threads_that_have_no_core_do_not_wait_for_the_lock():
    busy, cores = {"burn": 3.8, "rest": 0.1}, {"burn": 0.4, "rest": 0.0}
    assert find_lock_holder("burn", working(busy, cores), 5e-3) == "burn"
    assert find_lock_holder("burn", working(busy, cores, {"burn": 3.3}), 5e-3) is None


@pytest.mark.parametrize(
    ("facts", "used", "expected"),
    [
        ({"busy": 1.0, "running": 0.1}, 0.3, "stage"),
        ({"busy": 1.0, "running": 0.1, "reads": True}, 0.3, "storage"),
        ({"busy": 1.0, "running": 0.9, "reads": True}, 1.0, "stage"),
        ({"busy": 4.0, "running": 2.0, "coreless": 1.9}, 2.0, "cores"),
        ({"busy": 1.0, "running": 0.95}, 1.9, "cores"),
        ({"busy": 1.0, "running": 0.02, "coreless": 0.3}, 1.9, "stage"),
        ({"busy": 1.0, "running": 0.01, "coreless": 0.51, "reads": True}, 0.3, "storage"),
        # Files in the page cache, on a machine where others take the cores.
        ({"busy": 1.0, "running": 0.1, "coreless": 0.6, "reads": True}, 0.2, "stage"),
        # Other programs leave it a twentieth of a core per thread.
        ({"busy": 3.85, "running": 0.15, "coreless": 3.66}, 0.16, "cores"),
    ],
)
def test_the_cause_follows_from_where_the_workers_were(facts, used, expected):
    facts = {**facts}
    reads = facts.pop("reads", False)
    assert find_cause(StageProfile(1, **facts), reads, used, 2.0) == expected
