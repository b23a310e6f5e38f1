"""The fixture ``no_leaks``: the one part that needs pytest, which is no dependency of the package."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pipegraph.testing.leaks import Resources


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves threads, processes, descriptors or shared memory behind."""
    before = Resources.now()
    yield
    leaked = Resources.now().leaked_since(before)
    if leaked:  # perhaps only garbage that nobody has collected yet
        gc.collect()
        leaked = Resources.now().leaked_since(before)
    assert not leaked, "the test left behind: " + "; ".join(leaked)
