"""SIGKILL at any line of the cache: nothing corrupt, nothing locked, usage within the limit."""

from pathlib import Path
from typing import Any

import pytest

from pipegraph.storage.locks import try_exclusive
from pipegraph.storage.node_cache import NodeCache

ENTRIES, ENTRY_NBYTES, LIMIT = 12, 40_000, 200_000

# Children read at random, and end themselves with SIGKILL at a random line
# of the cache's code. Three live at any time, so that they meet at every lock.
READERS = """
import os, random, signal, sys
from pipegraph.storage import locks
from pipegraph.storage import node_cache as cache_module
from pipegraph.storage.node_cache import Cacheable, NodeCache
from pipegraph.storage.shard_files import crc32c_extend

folder, kills, seed, n, nbytes, limit = sys.argv[1], *map(int, sys.argv[2:])
modules = {module.__file__ for module in (cache_module, locks)}

def data(i):
    return bytes([i + 1]) * nbytes

# A new version takes the place of the one before, so that a full cache goes on to change.
entries = [
    [Cacheable(f"s3://b/{i}", nbytes, version=v, crc32c=crc32c_extend()(0, data(i))) for v in "abc"]
    for i in range(n)
]

def live(rng):
    lines = int(6000 ** rng.random() + 20 * rng.random())
    def trace(frame, event, arg):
        nonlocal lines
        if frame.f_code.co_filename not in modules:
            return None
        lines -= 1
        if lines <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    uses = [rng.randrange(n) for _ in range(1000)]
    sys.settrace(trace)
    cache = NodeCache(folder, limit)
    for i in uses:
        def download(write):
            for start in range(0, nbytes, nbytes // 4):
                write(start, data(i)[start : start + nbytes // 4])
        try:
            with cache.fetch(rng.choice(entries[i]), download) as file:
                assert file.read_at(0, file.size) == data(i), f"corrupt {i}"
        except OSError as error:
            assert "no room" in str(error), error
        with cache._space():
            assert cache.usage() <= limit, cache.usage()

rng, living, killed = random.Random(seed), 0, 0
while killed < kills or living:
    while living < 3 and killed + living < kills:
        child_rng = random.Random(rng.random())
        if os.fork() == 0:
            try:
                live(child_rng)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        living += 1
    pid, status = os.wait()
    living -= 1
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        sys.exit(f"a reader failed: {status}")
    killed += 1
"""


def kill_readers(programs: Any, folder: Path, kills: int, seed: int) -> None:
    done = programs.run(READERS, folder, kills, seed, ENTRIES, ENTRY_NBYTES, LIMIT)
    assert done.returncode == 0, done.stderr
    for place in ("objects", "partial"):
        for path in (folder / place).iterdir():
            with path.open("rb") as file:
                assert try_exclusive(file.fileno()), f"{path} is locked"
    for path in (folder / "objects").iterdir():
        data = path.read_bytes()
        assert len(data) == ENTRY_NBYTES
        assert data == data[:1] * ENTRY_NBYTES
    cache = NodeCache(folder, LIMIT)
    assert cache.usage() <= LIMIT
    assert list((folder / "partial").iterdir()) == []


@pytest.mark.parametrize("kills", [30, pytest.param(5000, marks=pytest.mark.slow)])
def test_readers_killed_at_random_lines_leave_the_cache_whole(
    tmp_path: Path, kills: int, programs: Any
) -> None:
    kill_readers(programs, tmp_path, kills, seed=kills)
