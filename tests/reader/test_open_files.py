"""Few open files suffice, and what a low limit costs is not paid in bytes read."""

from pathlib import Path
from typing import Any

SCRIPT = """
import resource, sys
import pipegraph as pg
from pipegraph import operators as ops

folder, limit, cache = sys.argv[1], int(sys.argv[2]), sys.argv[3]
graph = pg.Graph("few files")
select = ops.ShardSelect(folder + "/part-*.tar", manifest=folder + "/_manifest.json")
load = ops.Load(cache=pg.NodeCache(cache, "1 GB") if cache else None)
graph.add(select).then(load, workers=2).then(ops.Batch(16, collate=list))
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def read_so_far():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])

with graph.loader(epochs=2) as loader:
    before = read_so_far()
    samples = sum(len(batch) for _ in range(2) for batch in loader)
    print(samples, read_so_far() - before)
"""
"""Bytes are the process's own count of what its read calls gave."""


def run(programs: Any, folder: Path, limit: int, cache: Path | str) -> tuple[int, int]:
    done = programs.run(SCRIPT, folder, limit, cache)
    assert done.returncode == 0, done.stderr[-3000:]
    samples, nbytes = done.stdout.split()
    return int(samples), int(nbytes)


def write_parts(write_shards: Any, parts: int) -> Path:
    """Parts of one block each, with their manifest."""
    from pipegraph.storage import build_manifest

    path: Path = write_shards("tar", parts, 2)
    build_manifest(sorted(path.glob("part-*")), path / "_manifest.json")
    return path


def test_blocks_read_in_turn_are_checked_once_though_few_files_may_be_open(
    write_shards: Any, programs: Any
) -> None:
    folder = write_parts(write_shards, 80)
    data = sum(path.stat().st_size for path in folder.glob("part-*"))
    samples, nbytes = run(programs, folder, 64, "")
    assert samples == 2 * sum(2 + part for part in range(80))
    # Two epochs of samples, the blocks' checksums once, and their headers.
    assert nbytes < 6 * data
