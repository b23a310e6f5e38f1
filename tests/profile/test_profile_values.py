"""Profiles as values and as text."""

import dataclasses
import json
import sys

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.backends import BACKENDS
from pipegraph.profile.table import WIDTH


def profile(**changes):
    stages = {
        "read": pg.types.StageProfile(items=1000, samples=1000, nbytes=10**9, rate=90.0, busy=0.1, blocked=0.9, workers=1),
        "decode": pg.types.StageProfile(
            items=990, samples=990, rate=88.0, service_mean_s=0.021, busy=0.97, failed=10, retried=3, workers=2,
            dropped=10, grown_to=7, counters={"cache hits": 12},
        ),
        "pin": pg.types.StageProfile(),
    }  # fmt: skip
    bad = pg.types.Quarantined(b"k\n1", 4, 0, "decode", "DecodeError: " + "broken " * 40)
    given = {
        "stages": stages,
        "bottleneck": "decode",
        "stall_s": 4.5,
        "samples_per_s": 88.2,
        "quarantined": (bad,) * 9,
        "quarantined_count": 9,
    }
    return pg.Profile(**{**given, "items": 990, "samples": 990, "elapsed_s": 11.0, "passes": 1, **changes})


def test_a_profile_and_its_stages_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile().stall_s = 0.0
    with pytest.raises(TypeError):
        profile().stages["read"] = None


def test_the_table_fits_a_hundred_columns_and_says_what_went_wrong():
    text = str(profile(graph="a very long name of a graph, told twice"))
    assert all(len(text_line) <= WIDTH for text_line in text.splitlines())
    assert "decode: 10 failed, 3 retries, 10 dropped, cache hits 12, queue grew to 7 items" in text
    assert "quarantined: 9" in text
    assert "left out" in text


def test_sentences_are_wrapped_at_80_where_there_is_no_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", None)
    found = profile(graph="a very long name of a graph, told twice", first_batch_s=12.34)
    lines = str(found).splitlines()
    title = next(number for number, line in enumerate(lines) if line.startswith("stage "))
    end = len(lines) - next(
        n for n, line in enumerate(reversed(lines)) if line.startswith(("Training", "No", "Stage"))
    )
    sentences = lines[:title] + lines[end - 1 :]
    assert title > 1 and max(map(len, sentences)) <= 80


@pytest.mark.parametrize("columns", [60, 72, 80])
def test_the_table_follows_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    stage = pg.types.StageProfile(
        items=192, samples=192, nbytes=10**9, rate=3566.0, busy=0.9, blocked=0.1, workers=2
    )
    text = str(profile(stages={"decode_and_augment": stage}, bottleneck="decode_and_augment"))
    assert max(map(len, text.splitlines())) <= columns
    assert any(line.startswith("decode") and line.endswith("10 %") for line in text.splitlines())


def test_the_largest_numbers_still_fit_the_table():
    big = pg.types.StageProfile(
        items=123_456_789_012, samples=10**12, nbytes=10**15, rate=999_999.0, service_mean_s=0.000_123_4,
        busy=1.0, starved=1.0, blocked=1.0, workers=1024,
    )  # fmt: skip
    text = str(profile(stages={"n" * 40: big, "out": pg.types.StageProfile()}, bottleneck="consumer"))
    row = next(line for line in text.splitlines() if line.startswith("nnn"))
    assert len(row) <= WIDTH
    assert row.split()[-6:] == ["100", "%"] * 3
    assert "123,457 M" in row


def test_the_conclusion_is_a_sentence_with_its_evidence():
    assert (
        profile().conclusion == "Stage 'decode' holds training back: its 2 workers are busy 97 % of the time "
        "while what follows waits for it; training waited for data 41 % of the time."
    )
    assert profile(bottleneck="consumer", stall_s=0.01).conclusion.startswith("Training sets the pace")
    assert profile(items=0).conclusion == "Nothing has been delivered yet."


@pytest.mark.parametrize("bottleneck", ["consumer", "decode"])
def test_a_stage_that_runs_on_many_cores_in_threads_is_told_of_processes(bottleneck):
    def said(workers, backend):
        crowd = pg.types.StageProfile(busy=1.0, running=0.5, workers=workers, backend=BACKENDS[backend])
        return profile(stages={"decode": crowd}, bottleneck=bottleneck, cause="stage").conclusion

    assert "'decode' runs 7.0 cores' worth in threads" in said(14, "thread")
    assert "threads" not in said(8, "thread")
    assert "threads" not in said(14, "process")


def test_json_holds_everything_also_keys_that_json_does_not_know():
    found = json.loads(profile().to_json())
    assert found["stages"]["decode"]["counters"] == {"cache hits": 12}
    assert found["quarantined"][0]["key"] == str(b"k\n1")
    assert set(found) == {field.name for field in dataclasses.fields(pg.Profile)} - {"measured"}


def test_long_names_of_stages_do_not_widen_the_table():
    graph = pg.Graph("wide")
    node = graph.add(ops.FromIterable(range(3)), name="a source with a name as long as a sentence")
    node.then(lambda x: x, name="and a stage whose name is hardly any shorter than that")
    with graph.loader() as loader:
        assert list(loader) == [0, 1, 2]
        assert all(len(each) <= WIDTH for each in str(loader.profile()).splitlines())


def test_the_interpreter_lock_is_named_as_the_reason():
    held = dataclasses.replace(profile().stages["decode"], running=0.45)
    said = " ".join(str(profile(stages={"decode": held}, cause="lock", wake_s=0.004)).split())
    assert "Stage 'decode' holds training back: it holds the GIL (0.9 cores' worth of running)" in said
    assert "other threads wait 4 ms each time" in said


def test_a_run_that_was_too_short_blames_nobody():
    said = str(profile(elapsed_s=0.04))
    assert "too briefly to say" in said and "holds training back" not in said and "sets the pace:" not in said


def test_a_stage_that_holds_the_lock_is_told_the_line_to_write():
    from pipegraph.profile.table import conclude

    stage = dataclasses.replace(next(iter(profile().stages.values())), running=0.9)
    held = dataclasses.replace(
        profile(), stages={"work": stage}, bottleneck="work", cause="lock", items=10, elapsed_s=10.0
    )
    assert 'more threads do not help: give it backend="process"' in conclude(held)


def test_where_handing_over_takes_longest_nobody_is_said_to_set_the_pace():
    idle = {
        "read": pg.types.StageProfile(busy=0.1, workers=1),
        "decode": pg.types.StageProfile(busy=0.05, workers=2),
    }
    found = profile(stages=idle, bottleneck="consumer", stall_s=8.4, elapsed_s=10.0)
    assert found.conclusion.startswith("No stage sets the pace: training waited for data 84 % of the time")
    assert "backend='inline'" in found.conclusion


def test_training_that_waits_most_of_the_time_is_not_said_to_set_the_pace():
    stages = {
        "read": pg.types.StageProfile(busy=0.28, workers=2),
        "batch": pg.types.StageProfile(busy=0.15, workers=1),
    }
    found = profile(stages=stages, bottleneck="consumer", stall_s=6.7, elapsed_s=10.0)
    assert found.conclusion.startswith(
        "No stage sets the pace: training waited for data 67 % of the time, and the busiest stage worked 28 % of it."
    )


def test_cores_that_other_programs_use_are_not_said_to_be_ours():
    stages = {"decode": pg.types.StageProfile(busy=0.95, running=0.05, coreless=0.9, workers=4)}
    found = profile(stages=stages, bottleneck="decode", cause="cores", cores_used=0.2, cores=2.0)
    assert "this program gets 0.2 of 2, others the rest" in found.conclusion
