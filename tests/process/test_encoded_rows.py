"""Lines are parsed in the process that works on them: nothing else is another than in a thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops


def number(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["n"] == 150:
        raise KeyError("of the function")
    return {"n": sample["n"]}


def delivered(folder: Path, backend: Any, on_error: Any) -> Any:
    graph = pg.Graph("lines")
    samples = graph.add(ops.ShardSelect(str(folder), shuffle=False)).then(ops.Load(), name="load")
    samples.then(number, backend=backend, workers=2, on_error=on_error).then(ops.Batch(10))
    found = []
    with graph.loader() as loader:
        try:
            for chunk in loader.chunks():
                found.append((list(chunk.keys), chunk.data["n"].tolist()))
        except Exception as error:
            return found, type(error), str(error), error.__notes__
        return found, [(each.key, each.stage) for each in loader.profile().quarantined]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("broken", [None, 0, 255])
def test_samples_keys_and_errors_are_those_of_a_thread(
    tmp_path: Path, broken: int | None, named: bool
) -> None:
    rows = [{"n": n, "key": f"k{n}"} if named else {"n": n} for n in range(300)]
    lines = ["{broken" if n == broken else json.dumps(row) for n, row in enumerate(rows)]
    (tmp_path / "part-0.jsonl").write_text("\n".join(lines))
    for on_error in ("raise", pg.Skip(5)):
        assert delivered(tmp_path, "process", on_error) == delivered(tmp_path, "thread", on_error)
    if broken == 255:
        *_, text, notes = delivered(tmp_path, "process", pg.Skip(5))
        assert "part-0.jsonl, byte" in text
        assert notes == ["pipegraph: stage 'load', sample 255 at position 255, epoch 0"]
