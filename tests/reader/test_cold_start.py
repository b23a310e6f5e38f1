"""The first samples of a run come by ranges: how many bytes a first batch takes, and that nothing else changes."""

import itertools
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.reader import fetcher
from pipegraph.storage import Manifest, StoreClient, build_manifest
from pipegraph.storage import sub_blocks as pieces_module
from pipegraph.storage.sub_blocks import SUFFIX
from pipegraph.testing import Resources

LANES, BATCH = 6, 8
FORMATS = ("tar", "jsonl", "npy", "bin", "parquet")
SAMPLES = {"tar": 300, "jsonl": 1_500, "npy": 1_500, "bin": 4_000, "parquet": 1_000}
"""Of one part: about half a megabyte."""


@dataclass
class Asked:
    """What was asked of a store: every range, when it was asked for."""

    client: StoreClient
    lock: threading.Lock = field(default_factory=threading.Lock)
    ranges: list[tuple[str, int, int]] = field(default_factory=list)

    def submit(self, url: str, offset: int, nbytes: int, **more: Any) -> Any:
        with self.lock:
            self.ranges.append((url, offset, nbytes))
        return self.client.submit(url, offset, nbytes, **more)

    def read(self, url: str, offset: int, nbytes: int, **more: Any) -> bytes:
        with self.lock:
            self.ranges.append((url, offset, nbytes))
        return self.client.read(url, offset, nbytes, **more)

    def download(self, url: str, offset: int, nbytes: int, sink: Any, **more: Any) -> None:
        with self.lock:
            self.ranges.append((url, offset, nbytes))
        self.client.download(url, offset, nbytes, sink, **more)

    def nbytes(self) -> int:
        with self.lock:
            return sum(nbytes for _, _, nbytes in self.ranges)

    def parts(self) -> list[tuple[str, int, int]]:
        """Name of the part, offset, bytes."""
        with self.lock:
            found = [(url.rpartition("/")[2], offset, nbytes) for url, offset, nbytes in self.ranges]
        return [each for each in found if each[0].startswith("part-")]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


@pytest.fixture(autouse=True)
def small_sub_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small beside these small blocks as real ones are beside real blocks."""
    monkeypatch.setattr(pieces_module, "SUB_BLOCK_NBYTES", 2_000)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """The store clients of readers."""
    made: list[Asked] = []

    def make(options: Any) -> Any:
        made.append(Asked(StoreClient(options)))
        return made[-1]

    monkeypatch.setattr(fetcher, "StoreClient", make)
    return made


_numbers = itertools.count()
Remote = Callable[..., tuple[str, Manifest]]


@pytest.fixture
def remote(write_shards: Any, tmp_path: Path) -> Remote:
    """Parts with a manifest and their sub-blocks in a store in memory: the manifest's URL, and the manifest."""
    pytest.importorskip("obstore", reason="the cloud extra brings obstore")

    def put(form: str, sub_blocks: bool = True, checksums: bool = True, **more: Any) -> tuple[str, Manifest]:
        folder = write_shards(form, 4, more.pop("samples", SAMPLES[form]))
        out = tmp_path / f"index-{next(_numbers)}"
        out.mkdir()
        block_nbytes = more.pop("block_nbytes", 180_000)
        manifest = build_manifest(
            sorted(folder.glob("part-*")),
            out / "manifest.json",
            block_nbytes=block_nbytes,
            checksums=checksums,
            sub_blocks=sub_blocks,
        )
        root = f"memory://cold-start-{next(_numbers)}"
        for path in (*folder.iterdir(), *(p for p in out.rglob("*") if p.is_file())):
            key = path.relative_to(out).as_posix() if path.is_relative_to(out) else path.name
            data = path.read_bytes()
            if key == "manifest.json":
                data = data.replace(f"../{folder.name}/".encode(), f"{root}/".encode())
            with StoreClient() as store:
                store.put(f"{root}/{key}", data)
        return root, manifest

    return put


def graph_of(root: str, form: str, **load: Any) -> pg.Graph:
    graph = pg.Graph("cold-start", seed=3)
    select = ops.ShardSelect(
        f"{root}/part-*.{form}", order=pg.order.LaneOrder(lanes=LANES), manifest=f"{root}/manifest.json"
    )
    samples = graph.add(select, capacity=1).then(ops.Load(**load), name="load", workers=2, capacity=2)
    samples.then(ops.Batch(BATCH, collate=list), capacity=1)
    return graph


def plain(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()} for row in batch]


@pytest.mark.parametrize("form", FORMATS)
def test_the_first_batch_asks_for_a_small_part_of_the_blocks_it_touches(
    form: str, remote: Remote, stores: list[Asked]
) -> None:
    root, manifest = remote(form)
    with graph_of(root, form).loader() as loader:
        next(iter(loader))
        ranges = stores[0].parts()
        if form == "parquet":  # beside row groups this small footers are long
            sizes = {part.name: part.size for part in manifest.parts}
            ranges = [r for r in ranges if r[1] + r[2] < (sizes[r[0]] or 0) - 8]
        blocks = LANES * int(manifest.block_nbytes.mean())
        counters = loader.profile().stages["load"].counters
        assert counters.get("blocks loaded", 0) <= 1  # one at a part's end that is smaller than a sub-block
    assert counters["samples read by ranges"] >= BATCH
    # Without ranges it waits for a whole block of each lane.
    nbytes = [nbytes for _, _, nbytes in ranges]
    assert sum(nbytes) < 0.15 * blocks, sum(nbytes) / blocks
    assert max(nbytes) < 0.02 * blocks


@pytest.mark.parametrize("form", FORMATS)
def test_an_epoch_is_the_same_with_and_without_ranges_from_the_start_and_after_a_resume(
    form: str, remote: Remote, stores: list[Asked]
) -> None:
    root, _ = remote(form)
    without, _ = remote(form, sub_blocks=False)
    with graph_of(without, form).loader() as loader:
        expected = [plain(batch) for batch in loader]
        assert "samples read by ranges" not in loader.profile().stages["load"].counters
    found = []
    with graph_of(root, form).loader() as loader:
        for number, batch in enumerate(loader, 1):
            found.append(plain(batch))
            if number == len(expected) // 3:
                state = json.loads(json.dumps(loader.state_dict()))
                break
        assert loader.profile().stages["load"].counters["samples read by ranges"] > 0
    with graph_of(root, form).loader() as loader:
        loader.load_state_dict(state)
        found += [plain(batch) for batch in loader]
        assert loader.profile().stages["load"].counters["samples read by ranges"] > 0
    assert found == expected


@pytest.mark.parametrize("form", ["npy", "bin", "parquet"])
def test_formats_that_say_where_samples_lie_need_no_sub_blocks_where_nothing_would_go_unchecked(
    form: str, remote: Remote, stores: list[Asked]
) -> None:
    for checksums in (False, True):
        root, _ = remote(form, sub_blocks=False, checksums=checksums)
        with graph_of(root, form).loader() as loader:
            next(iter(loader))
            counters = loader.profile().stages["load"].counters
        assert ("samples read by ranges" in counters) == (not checksums)


def test_what_is_fetched_twice_is_bounded(remote: Remote, stores: list[Asked]) -> None:
    root, manifest = remote("tar")
    with graph_of(root, "tar").loader() as loader:
        for _ in loader:
            pass
        loaded = loader.profile().stages["load"].counters["blocks loaded"]
    assert loaded >= manifest.blocks
    whole = loaded * int(manifest.block_nbytes.max())
    assert stores[0].nbytes() < whole + LANES * int(manifest.block_nbytes.max())


def test_sub_blocks_that_differ_from_their_checksums_are_not_delivered(
    remote: Remote, stores: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = remote("tar")
    with graph_of(root, "tar").loader() as loader:
        expected = [plain(batch) for batch in loader]

    class Flipped(Asked):
        def submit(self, url: str, offset: int, nbytes: int, **more: Any) -> Any:
            pending = super().submit(url, offset, nbytes, **more)
            result = pending.result

            def flipped() -> bytes:
                data = bytearray(result())
                data[len(data) // 2] ^= 1
                return bytes(data)

            pending.result = flipped
            return pending

    monkeypatch.setattr(fetcher, "StoreClient", lambda options: Flipped(StoreClient(options)))
    with graph_of(root, "tar").loader() as loader:
        assert [plain(batch) for batch in loader] == expected
        assert "samples read by ranges" not in loader.profile().stages["load"].counters


def test_sub_blocks_of_another_state_of_a_part_are_not_used(
    remote: Remote, stores: list[Asked], write_shards: Any, tmp_path: Path
) -> None:
    folder = write_shards("jsonl", 2, 1_000)
    parts = sorted(folder.glob("part-*"))
    build_manifest(parts, folder / "manifest.json", block_nbytes=60_000, sub_blocks=True)
    old = tmp_path / "old"
    shutil.move(folder / f"manifest.json{SUFFIX}", old)
    lines = parts[0].read_bytes().splitlines(keepends=True)
    parts[0].write_bytes(b"".join(lines[::-1]))
    build_manifest(parts, folder / "manifest.json", block_nbytes=60_000)
    shutil.move(old, folder / f"manifest.json{SUFFIX}")
    graph = pg.Graph("stale", seed=3)
    select = ops.ShardSelect(folder / "part-*", manifest=folder / "manifest.json")
    load = ops.Load(cache=pg.NodeCache(tmp_path / "cache", "1 GB"))
    graph.add(select).then(load, name="load")
    with graph.loader() as loader:
        keys = [sample["key"] for sample in loader]
        counters = loader.profile().stages["load"].counters
    assert len(keys) == len(set(keys)) == 2_001
    assert counters["blocks loaded"] > 0


def test_blocks_that_lie_in_the_cache_already_are_not_read_by_ranges(
    remote: Remote, stores: list[Asked], tmp_path: Path
) -> None:
    root, _ = remote("tar")
    read_by_ranges = []
    for _ in range(2):
        cache = pg.NodeCache(tmp_path / "cache", "1 GB")
        with graph_of(root, "tar", cache=cache).loader() as loader:
            for _ in loader:
                pass
            counters = loader.profile().stages["load"].counters
            read_by_ranges.append(counters.get("samples read by ranges", 0))
    assert read_by_ranges[0] > 0
    assert read_by_ranges[1] == 0


def test_a_break_while_a_range_hangs_ends_at_once_and_leaves_nothing(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = remote("tar")
    hangs = threading.Event()

    class Hanging(Asked):
        def submit(self, url: str, offset: int, nbytes: int, **more: Any) -> Any:
            pending = self.client.submit(url, offset, nbytes, **more)
            if "part-" in url and nbytes:
                from concurrent.futures import Future

                pending.future.cancel()
                pending.future = Future()  # an answer that never comes
                hangs.set()
            return pending

    monkeypatch.setattr(fetcher, "StoreClient", lambda options: Hanging(StoreClient(options)))
    before = Resources.now()
    loader = graph_of(root, "tar").loader()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            next(iter(loader))
        except BaseException as error:
            failed.append(error)

    consumer = threading.Thread(target=run)
    consumer.start()
    assert hangs.wait(20)
    loader.close()
    consumer.join(20)
    assert not consumer.is_alive()
    assert failed
    assert not [leak for leak in Resources.now().leaked_since(before) if "pipegraph" in leak]
