"""Profiles as values and as text."""

import dataclasses
import json

import pipegraph as pg
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


def test_the_table_fits_a_hundred_columns_and_says_what_went_wrong():
    text = str(profile(graph="a very long name of a graph, told twice"))
    assert all(len(text_line) <= WIDTH for text_line in text.splitlines())
    assert "decode: 10 failed, 3 retries, 10 dropped, cache hits 12, queue grew to 7 items" in text
    assert "quarantined: 9" in text
    assert "left out" in text


def test_the_conclusion_is_a_sentence_with_its_evidence():
    assert (
        profile().conclusion == "Stage 'decode' holds training back: its 2 workers are busy 97 % of the time "
        "while what follows waits for it; training waited for data 41 % of the time."
    )
    assert profile(bottleneck="consumer", stall_s=0.01).conclusion.startswith("Training sets the pace")
    assert profile(items=0).conclusion == "Nothing has been delivered yet."


def test_json_holds_everything_also_keys_that_json_does_not_know():
    found = json.loads(profile().to_json())
    assert found["stages"]["decode"]["counters"] == {"cache hits": 12}
    assert found["quarantined"][0]["key"] == str(b"k\n1")
    assert set(found) == {field.name for field in dataclasses.fields(pg.Profile)} - {"measured"}


def test_training_that_waits_most_of_the_time_is_not_said_to_set_the_pace():
    stages = {
        "read": pg.types.StageProfile(busy=0.28, workers=2),
        "batch": pg.types.StageProfile(busy=0.15, workers=1),
    }
    found = profile(stages=stages, bottleneck="consumer", stall_s=6.7, elapsed_s=10.0)
    assert found.conclusion.startswith(
        "No stage sets the pace: training waited for data 67 % of the time, and all stages together worked 71 % of it."
    )
