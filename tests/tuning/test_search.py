"""What the tuner decides, from windows of a pipeline that is only computed."""

from dataclasses import replace
from itertools import pairwise

import pytest

from pipegraph.tuning.facts import Facts, Limits, Queue, Size, Work, fits
from pipegraph.tuning.model import p_empty, period_s, predicted_rate
from pipegraph.tuning.search import Search


def facts(works, sizes, rate=None, cores=16.0, **changes):
    """A window of a chain of stages whose throughput is that of the slowest."""
    stages = {work.name: work for work in works}
    names = [*stages, "consumer"]
    queues = tuple(Queue(a, b) for a, b in pairwise(names))
    slowest = max(work.work_s / sizes[work.name].workers for work in works)
    rate = 1 / slowest if rate is None else rate
    return replace(Facts(stages, queues, rate, 0.5, 0.001, 0.0, Limits(cores)), **changes)


def tuned(works, windows=60, cores=16.0, rate_of=None, capacity=8):
    """The sizes that a search ends with, and the search."""
    search = Search({work.name: Size(1, capacity) for work in works})
    sizes = search.sizes
    seen = [sizes]
    for _ in range(windows):
        found = facts(works, sizes, rate_of(sizes) if rate_of else None, cores)
        sizes = search.next(found)
        seen.append(sizes)
    return search, seen


def test_the_probability_of_an_empty_queue_has_its_limits():
    assert p_empty(1.0, 0.0, 4) == 0.0
    assert p_empty(0.0, 1.0, 4) == 1.0
    assert p_empty(2.0, 2.0, 3) == pytest.approx(1 / 4)
    assert p_empty(1.0 + 1e-7, 1.0, 3) == pytest.approx(1 / 4, rel=1e-4)
    assert p_empty(1000.0, 1.0, 500) == 0.0
    assert p_empty(1.0, 2.0, 1) == pytest.approx((1 - 0.5) / (1 - 0.25))


def test_the_model_is_bound_by_the_slowest_the_cores_and_the_lock():
    sizes = {"a": Size(2, 64), "b": Size(1, 64)}
    works = [Work("a", 0.02), Work("b", 0.03)]
    assert period_s(facts(works, sizes), sizes) == pytest.approx(0.03, rel=0.05)
    more = {**sizes, "b": Size(3, 64)}
    assert predicted_rate(facts(works, sizes), sizes, more) == pytest.approx(1 / 0.01, rel=0.1)
    computing = [Work("a", 0.02), Work("b", 0.03, core_s=0.03)]
    assert period_s(facts(computing, more, cores=1.0), more) == pytest.approx(0.03, rel=0.05)
    locked = [Work("a", 0.02), Work("b", 0.03, core_s=0.03, locked=True)]
    assert period_s(facts(locked, more), more) == pytest.approx(0.03, rel=0.05)


def test_it_raises_the_slowest_until_the_pipeline_is_balanced():
    search, _ = tuned([Work("a", 0.01), Work("b", 0.04), Work("c", 0.002)])
    assert search.sizes["b"].workers > 3 * search.sizes["a"].workers
    assert all(decision.outcome != "on trial" for decision in search.decisions[:-1])
    assert "b" in search.decisions[0].changes


def test_equal_stages_are_raised_together_where_one_alone_gains_nothing():
    search, _ = tuned([Work("a", 0.02), Work("b", 0.02)], windows=4, capacity=64)
    assert {"a", "b"} == set(search.decisions[0].changes)


def test_a_step_that_did_not_help_is_taken_back_and_the_distance_doubles():
    search, _ = tuned([Work("a", 0.02)], rate_of=lambda sizes: 50.0)
    assert search.sizes["a"].workers == 1
    assert {"taken back"} == {decision.outcome for decision in search.decisions}
    tried = [decision.changes["a"][1].workers for decision in search.decisions[:4]]
    assert tried == [2, 3, 5, 9]
    assert search.settled or len(search.decisions) > 4


def test_a_stage_that_holds_the_lock_gets_no_threads_and_the_process_backend_is_proposed():
    search, _ = tuned([Work("a", 0.001), Work("b", 0.02, core_s=0.02, computes=True, locked=True)])
    assert search.sizes["b"].workers == 1
    assert "backend='process'" in search.tuning.advice[0]


def test_a_stage_that_computes_never_has_more_workers_than_cores():
    _, seen = tuned([Work("a", 0.02, core_s=0.001, computes=True)], cores=3.0)
    assert max(sizes["a"].workers for sizes in seen) == 3


def test_no_step_exceeds_memory():
    works = [Work("a", 0.02, item_bytes=100)]
    found = facts(works, {"a": Size(1, 8)}, budget=Limits(16.0, memory=1000, held=850))
    assert fits(found, {"a": Size(1, 8)}, {"a": Size(2, 8)}) is None
    assert "memory_limit" in fits(found, {"a": Size(1, 8)}, {"a": Size(3, 8)})
    pinned = facts([replace(works[0], pinned=True)], {"a": Size(1, 8)}, budget=Limits(16.0, pinned=950))
    assert "pinned" in fits(pinned, {"a": Size(1, 8)}, {"a": Size(2, 8)})


def test_a_shift_of_cost_is_followed_and_what_nobody_needs_is_given_back():
    before = [Work("a", 0.04), Work("b", 0.005)]
    after = [Work("a", 0.005), Work("b", 0.04)]
    search = Search({"a": Size(1, 8), "b": Size(1, 8)})
    sizes = search.sizes

    def windows(works, count):
        nonlocal sizes
        for _ in range(count):
            slowest = max(0.004, *(work.work_s / sizes[work.name].workers for work in works))
            sizes = search.next(facts(works, sizes, 1 / slowest))

    windows(before, 60)
    assert search.sizes["a"].workers >= 8 > search.sizes["b"].workers
    windows(after, 80)
    assert search.sizes["b"].workers >= 8 > search.sizes["a"].workers


def test_training_that_does_not_wait_leaves_everything_as_it_is():
    works = [Work("a", 0.001)]
    search = Search({"a": Size(1, 8)})
    assert search.next(facts(works, search.sizes, 100.0, stall=0.0)) == {"a": Size(1, 8)}
    assert search.settled and not search.decisions


def test_a_stage_found_to_hold_the_lock_by_trial_is_not_tried_again():
    works = [Work("a", 0.02, core_s=0.02, computes=True)]
    search, seen = tuned(works, windows=80, rate_of=lambda sizes: 45.0 / sizes["a"].workers)
    assert "it holds the GIL" in search.tuning.advice[0]
    assert [decision.changes["a"][1].workers for decision in search.decisions] == [2]
    assert max(sizes["a"].workers for sizes in seen) == 2
    assert search.sizes["a"].workers == 1 and search.settled


def test_work_that_shifts_in_the_middle_of_a_trial_is_not_taken_for_the_lock():
    search = Search({"a": Size(1, 8)})
    sizes = search.sizes
    for work_s in (0.02, *[0.08] * 20):  # the first step is on trial when it grows
        works = [Work("a", work_s, core_s=0.001, computes=True)]
        sizes = search.next(facts(works, sizes))
    assert search.decisions[0].outcome == "taken back"
    assert not search.tuning.advice
    assert search.sizes["a"].workers > 2


def test_a_step_taken_back_because_of_one_disturbed_window_gets_a_second_trial():
    disturbed = set()

    def rate(sizes):
        workers = sizes["a"].workers
        first, _ = workers not in disturbed, disturbed.add(workers)
        return 45.0 if first and workers > 1 else 50.0 * workers

    search, _ = tuned([Work("a", 0.02)], windows=12, rate_of=rate)
    assert "taken back" in {decision.outcome for decision in search.decisions}
    assert search.sizes["a"].workers >= 2


def test_a_settled_search_opens_again_where_full_queues_had_carried_its_last_step():
    works = [Work("a", 0.004)]
    search = Search({"a": Size(4, 8)})
    sizes = search.next(facts(works, search.sizes, 1_000.0, stall=0.0))
    assert search.settled
    for rate in (900.0, 1_000.0, 900.0):
        assert search.next(facts(works, sizes, rate, stall=0.2)) == sizes and search.settled
    assert search.next(facts(works, sizes, 900.0, stall=0.2))["a"].workers == 5


def test_stages_of_fixed_size_bound_those_that_are_tuned():
    fixed = Work("fixed", 0.02, size=Size(4, 8), workers=False, capacity=False, pinned=True, item_bytes=1)
    works = [fixed, Work("auto", 0.04)]
    search = Search({"auto": Size(1, 8)})
    sizes = search.sizes
    for _ in range(40):
        slowest = max(0.02 / 4, 0.04 / sizes["auto"].workers)
        found = facts(works, {**sizes, "fixed": fixed.size}, 1 / slowest)
        sizes = search.next(found)
    assert 8 <= search.sizes["auto"].workers <= 10 and set(search.sizes) == {"auto"}
