"""The fixtures of all tests."""

import os

# Several test processes share the machine: in each of them OpenMP's threads would spin while they wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from pipegraph.storage import formats
from pipegraph.testing import no_leaks as no_leaks


@pytest.fixture(autouse=True)
def formats_of_its_own():
    """What a test, or a block of a page, registers for a suffix is not there for the next."""
    before = dict(formats._formats)
    yield
    formats._formats.clear()
    formats._formats.update(before)
