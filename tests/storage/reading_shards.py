"""What every shard format is tested by: streams, blocks and random access agree, damage is refused, memory is bounded."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from pipegraph.errors import DataError
from pipegraph.storage.formats import Format, Sample, format_of
from pipegraph.storage.manifest import Manifest
from pipegraph.storage.shard_files import BytesFile, LocalFile


def plain(sample: Sample) -> dict[str, object]:
    """Arrays to lists, so that samples compare."""
    return {k: v.tolist() if isinstance(v, np.ndarray | np.generic) else v for k, v in sample.items()}


def check(name: str, data: bytes, expected: list[dict[str, object]], form: Format | None = None) -> int:
    """Stream, blocks of several sizes and random access all give `expected`; returns the largest blocks."""
    form = form or format_of(name)
    file = BytesFile(data, name)
    assert expected == [plain(s) for s in form.samples(file)]
    largest = 0
    for block_nbytes in (1, 500, 5000, 1 << 30):
        blocks = list(form.index(file, block_nbytes))
        largest = max(largest, len(blocks))
        assert [0, *np.cumsum([b.samples for b in blocks])][:-1] == [b.first for b in blocks]
        got: list[dict[str, object]] = []
        for block in blocks:
            rows = form.read(file, block)
            assert block.samples == len(rows)
            backwards = [plain(rows[i]) for i in reversed(range(len(rows)))]
            assert backwards[::-1] == [plain(s) for s in rows[:]]
            assert plain(rows[-1]) == backwards[0]
            with pytest.raises(IndexError):
                rows[len(rows)]
            got += backwards[::-1]
        assert expected == got
    return largest


def read_damaged(
    name: str, shard: bytes, data: st.DataObject, form: Format | None = None, *, cut: bool = True
) -> None:
    """Change some bytes, and cut some off: what is read are other samples or a DataError, and no other error."""
    found = bytearray(shard)
    spots = st.tuples(st.integers(0, len(found) - 1), st.integers(0, 255))
    for at, value in data.draw(st.lists(spots, min_size=1, max_size=4)):
        found[at] = value
    if cut and data.draw(st.booleans()):
        del found[data.draw(st.integers(0, len(found) - 1)) :]
    form, file = form or format_of(name), BytesFile(bytes(found), name)
    with suppress(DataError):
        list(form.samples(file))
    with suppress(DataError):
        for block in form.index(file, 50):
            form.read(file, block)[:]


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


def written(folder: Path) -> list[Any]:
    """The samples of a folder of shards with a manifest, sorted by their keys."""
    found = []
    for part in Manifest.load(folder / "_manifest.json").parts:
        with LocalFile(part.uri) as file:
            found += format_of(part).samples(file)
    return sorted(found, key=lambda sample: str(sample.get("key")))
