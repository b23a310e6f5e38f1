"""Reads whole shards, and bounds the memory that this takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipegraph.storage import LocalFile
from pipegraph.storage.formats import Sample, format_of


def samples(path: Path) -> list[Sample]:
    with LocalFile(path) as file:
        return list(format_of(path.name).samples(file))


def index(path: Path) -> int:
    with LocalFile(path) as file:
        return sum(block.samples for block in format_of(path.name).index(file))


@contextmanager
def memory_bounded(nbytes: int) -> Iterator[None]:
    """Fails if the process's peak memory grows by more than `nbytes` inside."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_nbytes()
    yield
    assert peak_nbytes() - before < nbytes


def peak_nbytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
