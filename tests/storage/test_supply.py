"""Blocks loaded ahead: in the wanted order, within the bytes to hold, errors at the block's place."""

import io
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pipegraph.errors import LoaderClosedError, ShardError
from pipegraph.storage.cache import NodeCache
from pipegraph.storage.indexing import build_manifest
from pipegraph.storage.manifest import Manifest
from pipegraph.storage.stores import StoreClient
from pipegraph.storage.supply import BlockSupply, Loaded

BLOCK = 10_000


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Three local parts, of some ten blocks each."""
    for number in range(3):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as archive:
            for i in range(60):
                info = tarfile.TarInfo(f"{number}-{i:02d}.jpg")
                info.size = 900
                archive.addfile(info, io.BytesIO(bytes([number, i]) * 450))
    return build_manifest(str(tmp_path / "*.tar"), block_nbytes=BLOCK)


@pytest.fixture
def remote(manifest: Manifest, request: pytest.FixtureRequest) -> Manifest:
    """The same parts in a store."""
    name = f"memory://{request.node.name}"
    with StoreClient() as store:
        for part in manifest.parts:
            store.put(f"{name}/{part.name}", Path(part.uri).read_bytes())
        return build_manifest([f"{name}/{p.name}" for p in manifest.parts], store=store, block_nbytes=BLOCK)


def keys(supply: BlockSupply, number: int) -> list[str]:
    return [sample["key"] for sample in supply.samples(number)]


def test_the_samples_are_those_of_the_block(manifest: Manifest, remote: Manifest, tmp_path: Path) -> None:
    expected = [f"{part}-{i:02d}" for part in range(3) for i in range(60)]
    with (
        BlockSupply(manifest) as local,
        BlockSupply(remote, store=StoreClient(), cache=NodeCache(tmp_path / "cache", "1 MB")) as far,
    ):
        for supply in (local, far):
            supply.want(range(manifest.blocks))
            assert [key for n in range(manifest.blocks) for key in keys(supply, n)] == expected


def test_wanted_blocks_are_loaded_ahead_in_their_order(remote: Manifest) -> None:
    seen: list[Loaded] = []
    with BlockSupply(remote, store=StoreClient(), loaders=1, loaded=seen.append) as supply:
        supply.want([7, 3, 11])
        supply.wait_for([7, 3, 11])
        assert supply.held == (3, 7, 11)
        keys(supply, 3)
    assert [(one.number, one.ahead) for one in seen] == [(7, True), (3, True), (11, True)]
    assert all(one.nbytes == remote.block_nbytes[one.number] and one.seconds > 0 for one in seen)


def test_no_more_than_the_bytes_to_hold_are_loaded_ahead(remote: Manifest) -> None:
    three = int(remote.block_nbytes[:3].sum())
    with BlockSupply(remote, store=StoreClient(), hold_nbytes=three) as supply:
        supply.want(range(10))
        supply.wait_for([0, 1, 2])
        assert supply.held == (0, 1, 2)
        assert keys(supply, 9)  # waited for: loaded in any case
        assert supply.held == (0, 1, 2, 9)
        supply.want(range(2, 10))  # 0 and 1 are used up
        supply.wait_for([2, 3, 9])
        assert supply.held == (2, 3, 9)


def test_a_block_larger_than_the_bytes_to_hold_is_still_loaded(remote: Manifest) -> None:
    with BlockSupply(remote, store=StoreClient(), hold_nbytes=1) as supply:
        supply.want([4, 5])
        supply.wait_for([4])
        assert supply.held == (4,)
        assert len(keys(supply, 5)) == remote.block_samples[5]


def test_without_a_plan_the_blocks_used_last_are_held(remote: Manifest) -> None:
    with BlockSupply(remote, store=StoreClient(), hold_nbytes=3 * BLOCK) as supply:
        for number in (0, 1, 2, 0, 5):
            keys(supply, number)
        assert supply.held == (0, 2, 5)


def test_readers_of_one_block_share_one_load(remote: Manifest) -> None:
    seen: list[Loaded] = []
    with BlockSupply(remote, store=StoreClient(), loaded=seen.append) as supply:
        supply.want([4])
        threads = [threading.Thread(target=keys, args=(supply, 4)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [one.number for one in seen] == [4]


def test_a_load_that_fails_ahead_is_raised_at_its_block_and_tried_again(manifest: Manifest) -> None:
    path = Path(manifest.parts[1].uri)
    good = path.read_bytes()
    path.write_bytes(b"broken" + good[6:])
    first = int(manifest.first_block[1])
    with BlockSupply(manifest) as supply:
        supply.want([first - 1, first, first + 1])
        supply.wait_for([first - 1, first, first + 1])
        assert len(keys(supply, first - 1)) > 0
        with pytest.raises(ShardError, match="checksum does not match"):
            keys(supply, first)
        assert len(keys(supply, first + 1)) > 0
        path.write_bytes(good)
        assert keys(supply, first)[0] == "1-00"


def test_close_ends_a_wait_and_every_thread(remote: Manifest, tmp_path: Path) -> None:
    begun, errors = threading.Event(), list[Exception]()
    store = StoreClient()

    def slow(*arguments: object, **more: object) -> None:
        begun.set()
        store.submit("http://127.0.0.1:9/", 0, 1).result()  # until the client is closed, or long after

    store.download = slow  # type: ignore[method-assign]
    supply = BlockSupply(remote, store=store, cache=NodeCache(tmp_path / "cache", "1 MB"))
    supply.want([3])
    begun.wait()

    def wait() -> None:
        try:
            supply.samples(3)
        except LoaderClosedError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    supply.close()
    supply.close()
    waiter.join()
    assert len(errors) == 1
    assert not [t for t in threading.enumerate() if t.name.startswith("pipegraph-blocks")]
    with pytest.raises(LoaderClosedError):
        supply.samples(0)


def test_samples_stay_readable_after_their_block_was_given_up(
    manifest: Manifest, tmp_path: Path, open_descriptors: Callable[[], list[str]]
) -> None:
    before = open_descriptors()
    with BlockSupply(manifest, cache=NodeCache(tmp_path / "cache", "1 MB")) as supply:
        samples = supply.samples(5)
        supply.want([6])
        supply.wait_for([6])
        assert len(list(samples)) == manifest.block_samples[5]
    assert samples[0]["jpg"]
    del samples, supply
    assert before == open_descriptors()
    assert os.listdir(tmp_path / "cache" / "objects")
