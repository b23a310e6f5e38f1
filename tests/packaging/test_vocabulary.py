"""One word for one thing: words that were private to this project stay out of code and documentation."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

INSTEAD = {
    r"any thread may call anything": "thread-safe",
    r"errors speak": "what happens to an error",
    r"foresight": "next-use index",
    r"itinerary|itineraries": "read schedule",
    r"learnt": "estimated",
    r"(?:let|lets|letting) go of": "release",
    r"brought near": "fetched, local",
    r"shelf|shelves|\w+Shelf": "block source",
    r"the pipeline stands still": "the pipeline is stalled",
    r"timetable": "prefetch planner",
    r"the passing on itself": "cost per hop",
}
"""Pattern of a word -> the word to use instead."""


def texts() -> list[Path]:
    code = [path for folder in ("pipegraph", "operators") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [*code, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]


@pytest.mark.parametrize(("word", "instead"), INSTEAD.items(), ids=list(INSTEAD.values()))
def test_the_fields_word_is_used(word: str, instead: str) -> None:
    pattern = re.compile(rf"\b(?:{word})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()!r}, write {instead!r}"
        for path in texts()
        for text in [path.read_text(encoding="utf-8")]
        for match in pattern.finditer(text)
    ]
    assert not found, "\n".join(found)
