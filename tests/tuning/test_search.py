"""What the tuner decides, from windows of a pipeline that is only computed."""

from dataclasses import replace
from itertools import pairwise
from math import inf

from pipegraph.profile.model import Limits, Pipeline, Size, Work
from pipegraph.profile.search import Search, Window


def window(works, sizes, rate=None, cores=16.0, memory=inf, held=0, stall=0.5, locked=False, **more):
    """A window of a chain of stages, ``name -> Work``, whose throughput is that of the slowest."""
    now = {name: replace(work, size=sizes.get(name, work.size)) for name, work in works.items()}
    slowest = max(work.seconds / work.size.workers for work in now.values())
    period_s = slowest if rate is None else 1 / rate
    held += sum(work.item_bytes * work.size.workers for work in now.values())
    pipeline = Pipeline(now, period_s, 0.001, Limits(cores, memory, held), locked=locked)
    return Window(pipeline, stall, **more)


def tuned(works, windows=60, rate_of=None, capacity=8, **more):
    """The search at the end, and all sizes that it tried."""
    search = Search({name: Size(1, capacity) for name in works})
    sizes, seen = search.sizes, []
    for _ in range(windows):
        sizes = search.next(window(works, sizes, rate_of(sizes) if rate_of else None, **more))
        seen.append(sizes)
    return search, seen


def computing(seconds, cores=16.0, **more):
    return Work(
        seconds,
        seconds,
        seconds,
        most=cores,
        why=f"it computes, and there are {cores:g} cores",
        **more,
    )


def test_work_that_waits_reaches_the_step_in_few_windows_each_at_most_four_times_as_large():
    search, seen = tuned({"read": Work(0.128, 0.128)}, windows=12)
    assert search.sizes["read"].workers >= 128
    workers = [1, *(sizes["read"].workers for sizes in seen)]
    assert all(after <= 4 * before for before, after in pairwise(workers))
    assert len(search.decisions) <= 5 and search.settled
    assert search.limit == "training sets the pace"


def test_all_stages_are_raised_together_until_they_are_balanced():
    search, _ = tuned({"a": Work(0.010), "b": Work(0.040), "c": Work(0.0002)})
    assert search.sizes["b"].workers > 3 * search.sizes["a"].workers
    assert search.sizes["c"].workers == 1
    assert all(decision.outcome == "kept" for decision in search.decisions)


def test_what_brings_nothing_is_taken_back_in_shorter_steps_and_the_limit_says_so():
    search, _ = tuned({"a": Work(0.02, 0.02)}, windows=20, rate_of=lambda sizes: 50.0)
    assert search.sizes["a"].workers == 1
    assert {"taken back"} == {decision.outcome for decision in search.decisions}
    assert [decision.changes["a"][1].workers for decision in search.decisions[:2]] == [4, 2]
    assert search.limit == "'a' sets the pace: 2 workers were no faster than 1"


def test_a_stage_that_holds_the_lock_gets_no_threads_and_the_process_backend_is_proposed():
    held = computing(0.02)
    held = replace(held, locked=True, most=1, why="it holds the GIL")
    search, _ = tuned({"a": Work(0.001), "b": held})
    assert search.sizes["b"].workers == 1
    assert "backend='process'" in search.tuning.advice[0]
    assert search.limit == "'b' sets the pace: it holds the GIL"


def test_no_step_exceeds_memory_and_the_limit_is_named():
    works = {"a": Work(0.2, 0.2, item_bytes=100)}
    search, seen = tuned(works, memory=1500, held=750)
    assert max(sizes["a"].workers for sizes in seen) <= 1 + 6
    assert search.limit == "'a' sets the pace: memory_limit leaves 50 bytes"


def test_training_that_does_not_wait_leaves_everything_as_it_is():
    search = Search({"a": Size(1, 8)})
    assert search.next(window({"a": Work(0.001)}, search.sizes, 100.0, stall=0.0)) == {"a": Size(1, 8)}
    assert search.settled and not search.decisions
    assert search.limit == "training hardly waits"
