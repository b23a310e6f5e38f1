"""States of graphs whose stages live in processes: exact at every step, and the same as everywhere."""

import importlib.util
from pathlib import Path

import pytest
import torch

import pipegraph as pg
from pipegraph.testing import assert_resumes_exactly
from pipegraph.testing.outcome import placed, run_pass

_spec = importlib.util.spec_from_file_location(
    "resume_cases", Path(__file__).parent.parent / "engine" / "test_resume.py"
)
_cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_cases)
CASES = _cases.CASES

pytestmark = pytest.mark.usefixtures("no_leaks")

QUICK = ["FlatMap", "a stateful regrouping operator"]


def in_processes(name):
    return lambda: placed(CASES[name](), "process", 2)


@pytest.mark.parametrize("name", QUICK)
def test_resumes_exactly_at_every_step(name):
    assert_resumes_exactly(in_processes(name), epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_graph_resumes_exactly_at_every_step(name):
    assert_resumes_exactly(in_processes(name), epochs=1)


@pytest.mark.parametrize("name", QUICK)
def test_a_state_taken_with_processes_is_good_without_and_the_other_way_round(name):
    for first, second in ((in_processes(name), CASES[name]), (CASES[name], in_processes(name))):
        with first().loader() as loader:
            whole = run_pass(loader).chunks
        with first().loader() as loader:
            chunks = loader.chunks() if hasattr(loader, "chunks") else iter(loader)
            for _ in range(max(1, len(whole) // 2)):
                next(chunks)
            state = loader.state_dict()
        with second().loader() as loader:
            loader.load_state_dict(state)
            assert run_pass(loader).chunks == whole[max(1, len(whole) // 2) :]


class Noise(pg.Source):
    """Draws from torch's global generator for each item."""

    def iterate(self, epoch, rank, world_size, start):
        for step in range(start, 8):
            yield step, float(torch.rand(()))

    def length(self, epoch, rank, world_size):
        return 8


def test_a_source_in_a_process_draws_the_same_behind_a_resume():
    def made():
        graph = pg.Graph("noise", seed=1)
        graph.add(Noise(), backend="process")
        return graph.loader()

    with made() as loader:
        whole = list(loader)
    with made() as loader:
        items = iter(loader)
        head, state = [next(items) for _ in range(3)], loader.state_dict()
    with made() as loader:
        loader.load_state_dict(state)
        assert [*head, *loader] == whole
