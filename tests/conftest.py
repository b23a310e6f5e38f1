"""The fixtures of all tests."""

import gc
import os
import signal

# Several test processes share the machine: in each of them OpenMP's threads would spin while they wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # pytest-xdist sets the terminal's width, and tables would follow it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import Iterator

import programs as programs_of_tests
import pytest

from pipegraph.engine.crew import Crew
from pipegraph.engine.process import zygote
from pipegraph.storage import formats
from pipegraph.testing import no_leaks as no_leaks

# Clients of object stores would ask a proxy for what is served on loopback.
for name in [each for each in os.environ if each.lower().endswith("_proxy")]:
    del os.environ[name]

# Where many tests share the machine, a thread may stand for longer than a close waits for it: its warning would be an
# error of a test that says nothing of it.
Crew.close.__defaults__ = (30.0,)

pytest_plugins = ["object_store", "accelerators"]

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the environment of the Ray tests has none
    pass
else:  # the same examples every time, and none fails for being slow; `make fuzz` draws others
    settings.register_profile(
        "tests",
        deadline=None,
        derandomize="PIPEGRAPH_FUZZ_EXAMPLES" not in os.environ,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedule", help="run one schedule again, as a failing model printed it (docs/schedules.md)"
    )


CASES = 4
"""How many cases of a parametrised test ``make test`` runs: the first, the last, and others evenly between them."""
INSTALLED_FOR_ALL = {"s3_port", "ffmpeg", "pandas"}
"""Fixtures that need what only ``make test-all`` installs."""


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        kept = {round(place * (len(cases) - 1) / (CASES - 1)) for place in range(CASES)}
        for number, item in enumerate(cases):
            if number not in kept or INSTALLED_FOR_ALL & {*item.fixturenames}:
                item.add_marker("matrix")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: Python's collector looks only at what tests make."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


@pytest.fixture(autouse=True)
def formats_of_its_own():
    """What a test, or a block of a page, registers for a suffix is not there for the next."""
    before = dict(formats._formats)
    yield
    formats._formats.clear()
    formats._formats.update(before)


@pytest.fixture(autouse=True)
def zygote_of_its_own():
    """A test with threads starts one that lives as long as the trainer; the next test may fork again."""
    yield
    zygote.end_lasting()


@pytest.fixture(scope="session")
def programs() -> Iterator[programs_of_tests.Server]:
    """Runs programs in processes of their own, without their imports' time."""
    with programs_of_tests.Server() as server:
        yield server
