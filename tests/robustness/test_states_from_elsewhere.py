"""States that are none, or were saved by a program that knows the functions by another module's name."""

from __future__ import annotations

import copy
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops


def make(workers: int = 1, seed: int | None = 1) -> pg.Graph:
    graph = pg.Graph("numbers", seed=seed)
    numbers = graph.add(ops.FromSequence(range(20), order=pg.order.StridedOrder()), name="numbers")
    numbers.then(abs, name="abs", workers=workers).then(ops.Batch(3, collate=list))
    return graph


def saved(steps: int = 2) -> dict[str, Any]:
    with make().loader() as loader:
        passing = iter(loader)
        for _ in range(steps):
            next(passing)
        state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
        return state


def load(state: Any, graph: pg.Graph | None = None) -> list[Any]:
    with (graph or make()).loader() as loader:
        loader.load_state_dict(state)
        return list(loader)


@pytest.mark.parametrize("state", [None, 5, "x", {}, b"", [], [{}], [None], {"version": 1}])
def test_what_is_no_state_is_refused_as_such(state: Any) -> None:
    with pytest.raises(pg.errors.StateError, match="not the state of a loader|list of states is empty"):
        load(state)


def test_a_state_is_a_copy_that_later_steps_do_not_change() -> None:
    with make().loader() as loader:
        passing = iter(loader)
        next(passing)
        state = loader.state_dict()
        kept = copy.deepcopy(state)
        next(passing)
        assert state == kept
        state["rank0"]["cursor"] = 99
        assert loader.state_dict()["rank0"]["cursor"] == 6


def test_a_function_of_another_name_is_named_with_both(tmp_path: Path, programs: Any) -> None:
    code = """
        import json, os, sys
        import pipegraph as pg
        from pipegraph import operators as ops

        def FUNCTION(x):
            return 2 * x

        graph = pg.Graph("doubles")
        graph.add(ops.FromSequence(range(5))).then(FUNCTION, name="double")
        with graph.loader() as loader:
            if os.path.exists("state.json"):
                try:
                    loader.load_state_dict(json.load(open("state.json")))
                    print(list(loader))
                except pg.errors.StateError as error:
                    print(error)
            else:
                next(iter(loader))
                json.dump(loader.state_dict(), open("state.json", "w"))
    """

    def run(script: str, function: str = "double") -> str:
        (tmp_path / script).write_text(textwrap.dedent(code).replace("FUNCTION", function))
        program = f"import runpy; runpy.run_path({str(tmp_path / script)!r}, run_name='__main__')"
        made = programs.run(
            program, cwd=tmp_path, env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        )
        assert made.returncode == 0, made.stderr
        return str(made.stdout)

    run("train.py")
    assert run("train.py") == "[2, 4, 6, 8]\n"
    assert "stage 'double' had the function train.double, now train_v2.twice" in run("train_v2.py", "twice")
