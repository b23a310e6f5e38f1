"""loader(isolate=True): the same chunks, states, errors and ends as without it, from a process of its own."""

import gc
import json
import os
import signal
import threading

import numpy as np
import pytest
import torch

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.testing import assert_resumes_exactly
from pipegraph.testing.outcome import Delivered, assert_equal_chunks, is_ordered
from tests.engine.test_resume import CASES, LOOSE

pytestmark = pytest.mark.usefixtures("no_leaks")


def steps(make, epochs=2, **options):
    """All chunks, and the state after each."""
    chunks, states = [], []
    with make().loader(epochs=epochs, **options) as loader:
        for _ in range(epochs):
            states.append(json.loads(json.dumps(loader.state_dict())))
            for chunk in loader.chunks():
                chunks.append(Delivered.of(chunk))
                states.append(json.loads(json.dumps(loader.state_dict())))
        states.append(json.loads(json.dumps(loader.state_dict())))
    return chunks, states


def rest(make, state, epochs, **options):
    """The chunks that follow a state."""
    chunks = []
    with make().loader(epochs=epochs, **options) as loader:
        loader.load_state_dict(state)
        for _ in range(loader.epoch, epochs):
            chunks += [Delivered.of(chunk) for chunk in loader.chunks()]
    return chunks


@pytest.mark.parametrize("name", CASES)
def test_chunks_and_states_are_those_without_it_and_a_state_goes_on_in_either(name):
    make = CASES[name]
    chunks, states = steps(make)
    isolated, told = steps(make, isolate=True)
    assert_equal_chunks(tuple(chunks), tuple(isolated), True, "isolated")
    assert states == told
    middle = len(chunks) // 2 + (1 if len(chunks) // 2 < len(chunks) // 2 else 2)
    left = rest(make, told[middle], 2)
    assert_equal_chunks(tuple(left), tuple(rest(make, told[middle], 2, isolate=True)), True, "restored")
    assert left


@pytest.mark.parametrize("name", LOOSE)
def test_below_completion_order_every_sample_comes_once(name):
    make = LOOSE[name]
    assert not is_ordered(make())
    chunks, _ = steps(make)
    isolated, told = steps(make, isolate=True)
    assert_equal_chunks(tuple(chunks), tuple(isolated), False, "isolated")
    at = len(chunks) // 3
    begun = isolated[:at]
    assert_equal_chunks(tuple(chunks), tuple(begun + rest(make, told[at], 2, isolate=True)), False, "restored")
