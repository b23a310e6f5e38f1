"""One word for one thing: words that were private to this project stay out of code and documentation."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

INSTEAD = {
    r"data sets?": "dataset",
    r"(?<!global )interpreter(?:'s)? lock": "GIL",
    r"pre-emption": "preemption",
    r"wants": "needs",
    r"any thread may (?:call|ask|use|take)|safe from any thread": "thread-safe",
    r"brought near": "fetched, local",
    r"Crew|Team": "replica runner, replica threads",
    r"errors speak": "what happens to an error",
    r"foresight": "next-use index",
    r"(?:goes|go|going|went|gone) on": "continue, resume",
    r"(?-i:_?MOST(?:_\w+)?|_?FEW(?:EST)?(?:_\w+)?|LEAST_\w+)|_most\w*|most_\w+|_few": "max_..., min_...",
    r"in hand|at hand": "in work, queued, ready",
    r"itinerary|itineraries": "read schedule",
    r"_?lap|laps|tally": "interval, pass totals",
    r"leads? to this frame": "refers to this frame",
    r"learnt": "estimated",
    r"(?:let|lets|letting) go of": "release",
    r"shelf|shelves|\w+Shelf": "block source",
    r"so many": "the number's name, this many",
    r"stand-in|stands in (?:an?|the) (?:\w+ )?thread": "proxy",
    r"the life of (?:a|an|the) (?:\w+ )?(?:thread|process|worker|sidecar)|the zygote's life": "body, main function",
    r"the passing on itself": "cost per hop",
    r"the pipeline stands still|(?:everything|it) stands still|stand still": "stalled",
    r"timetable": "prefetch planner",
    r"told|_?Told\w*": "notified, reported",
    r"Unasked": "a name that says what happened",
    r"what stands (?:in|for|before)": "proxy, placeholder",
    r"whoever": "the thread that, the caller",
}
"""Pattern of a word -> the word to use instead."""


def texts() -> list[Path]:
    code = [path for folder in ("pipegraph", "operators") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [*code, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]


@pytest.mark.parametrize(("word", "instead"), INSTEAD.items())
def test_the_fields_word_is_used(word: str, instead: str) -> None:
    pattern = re.compile(rf"\b(?:{word})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()!r}, write {instead!r}"
        for path in texts()
        for text in [path.read_text(encoding="utf-8")]
        for match in pattern.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_a_lane_is_one_of_a_lane_order() -> None:
    """Everything else that runs beside others has a name of its own: sequence numbers, reduce streams, shares."""
    elsewhere = re.compile(r"lanes=|LaneOrder|each lane|lanes of the default order")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        if path.suffix == ".py" and not str(path.relative_to(ROOT)).startswith("pipegraph/order/")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\b_?lanes?\b", line) and not elsewhere.search(line)
    ]
    assert not found, "\n".join(found)
