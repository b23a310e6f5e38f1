"""Store clients over processes: shared caches, pickling, forks, and what is left after them."""

import itertools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipegraph.storage.stores import StoreClient

DATA = random.Random(0).randbytes(1_000_000)


RANK = """
import sys
from pipegraph.storage.node_cache import Cacheable, NodeCache
from pipegraph.storage.shard_files import crc32c_extend
from pipegraph.storage.stores import StoreClient
folder, url, port, path = sys.argv[1:]
data = open(path, "rb").read()
options = {"endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1", "access_key_id": "a",
           "secret_access_key": "b", "virtual_hosted_style_request": False}
with StoreClient(options) as store, NodeCache(folder, "2 MB") as cache:
    for start in range(0, 1_000_000, 50_000):
        want = data[start : start + 50_000]
        what = Cacheable(url, 50_000, start, crc32c=crc32c_extend()(0, want))
        with cache.fetch(what, lambda write: store.download(url, start, 50_000, write)) as file:
            assert file.read_at(0, 50_000) == want
"""


def test_the_ranks_of_a_node_download_each_entry_once_between_them(
    proxy: Any, url: str, tmp_path: Path, programs: Any
) -> None:
    (tmp_path / "data").write_bytes(DATA)
    arguments = [tmp_path / "cache", url, proxy.port, tmp_path / "data"]
    ranks = [programs.start(RANK, *arguments) for _ in range(4)]
    assert [rank.communicate() for rank in ranks] == [("", "")] * 4
    assert [rank.returncode for rank in ranks] == [0] * 4
    ranges = [seen for command, seen, _ in proxy.seen if command == "GET"]
    assert sorted(ranges) == sorted(f"bytes={s}-{s + 49_999}" for s in range(0, 1_000_000, 50_000))


def test_no_descriptor_or_thread_is_left_after_close(
    s3_port: int, url: str, s3_options: Callable[[int], dict[str, Any]]
) -> None:
    def cycle() -> None:
        with StoreClient(s3_options(s3_port)) as store:
            store.read(url, 0, 100)

    cycle()
    threads, before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in itertools.repeat(None, 5):
        cycle()
    assert set(threading.enumerate()) <= threads
    # The pool of connections belongs to the client library, which lets go of it in its own time.
    assert len(os.listdir("/proc/self/fd")) <= before + 5


FORKED = """
import os, sys, warnings
from pipegraph.errors import StoreError
from pipegraph.storage.stores import StoreClient
warnings.simplefilter("ignore")
store = StoreClient()
store.put("memory://x/a", b"abc")
if os.fork() == 0:
    for client, said in (store, "before a fork"), (StoreClient(), "was forked"):
        try:
            client.read("memory://x/a", 0, 1)
            os._exit(2)
        except StoreError as error:
            if said not in str(error):
                os._exit(1)
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_client_in_a_fork_of_a_process_that_has_read_a_store_is_an_error_and_no_hang(programs: Any) -> None:
    assert programs.run(FORKED).returncode == 7


IN_PROCESSES = """
import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.storage.stores import StoreClient

def work(x):
    with StoreClient() as store:
        store.put(f"memory://b/{x}", b"abc")
        return len(store.read(f"memory://b/{x}", 0, 3))

with StoreClient() as store:
    store.put("memory://b/x", b"1")
graph = pg.Graph("g")
graph.add(ops.FromIterable(range(3))).then(work, backend="process")
with graph.loader() as loader:
    assert list(loader) == [3, 3, 3]
"""


def test_a_process_stage_reads_a_store_after_the_trainer_has(programs: Any) -> None:
    assert programs.run(IN_PROCESSES).returncode == 0
