"""Data that is not whole is an error that names it, never a shorter epoch."""

import re
from pathlib import Path
from typing import Any

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.cli.app import run
from pipegraph.errors import DataError
from pipegraph.storage import Manifest, build_manifest, pack_shards

SAMPLES = 40


def loader_of(parts: Any, on_error: Any = "raise", **options: Any) -> Any:
    graph = pg.Graph("whole")
    graph.add(ops.ShardSelect(parts, **options), name="select").then(
        ops.Load(), name="load", on_error=on_error
    )
    return graph.loader()


def count(parts: Any, **options: Any) -> int:
    with loader_of(parts, **options) as loader:
        return len(list(loader))


# -- a pack that has not ended -----------------------------------------------------------------------


class Stopped(Exception):
    pass


def stop(state: Any) -> None:
    if state.shards == 2:
        raise Stopped


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """The folder of a pack that was stopped behind its second shard."""
    for number in range(SAMPLES):
        (tmp_path / "my photos").mkdir(exist_ok=True)
        (tmp_path / "my photos" / f"{number:02}.txt").write_text(str(number) * 200)
    with pytest.raises(Stopped):
        pack_shards(tmp_path / "my photos", tmp_path / "out", size="10 kB", shuffle=7, progress=stop)
    return tmp_path / "out"


NOT_ENDED = "out': the pack into this folder has not ended, .* make the call that began it again"


def test_every_reader_refuses_an_unfinished_pack(
    unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_order = pg.order.PartOrder()
    monkeypatch.chdir(unfinished)
    readers = {
        "folder": lambda: count(unfinished),
        "glob": lambda: count(f"{unfinished}/*.tar"),
        "relative": lambda: count("*.tar"),
        "list": lambda: count(sorted(unfinished.glob("*.tar"))),
        "whole parts": lambda: count(unfinished, order=part_order),
        "manifest": lambda: count(unfinished, manifest=Manifest.of([])),
        "length": lambda: len(loader_of(unfinished)),
        "index": lambda: build_manifest(unfinished),
    }
    for read in readers.values():
        with pytest.raises(DataError, match="the pack into this folder has not ended") as refused:
            read()
    assert re.search(NOT_ENDED, str(refused.value))
    assert run(["index", str(unfinished)]) == 2
    pack_shards(tmp_path / "my photos", unfinished, size="10 kB", shuffle=7)
    assert count(unfinished) == SAMPLES


# -- shards that are missing -------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
def test_a_missing_shard_is_an_error_that_names_it(write_shards: Any, given: bool, tmp_path: Path) -> None:
    folder = write_shards("tar")
    build_manifest(folder, (tmp_path / "given.json") if given else folder / "_manifest.json")
    options: dict[str, Any] = {"manifest": tmp_path / "given.json"} if given else {}
    count(folder, **options)
    (folder / "part-01.tar").unlink()
    for named in (folder, f"{folder}/*.tar", [f"{folder}/part-0*.tar"], sorted(folder.glob("*.tar"))):
        for order in (None, pg.order.PartOrder()):
            with pytest.raises(
                DataError, match=r"1 of the 4 shards that .*\.json' lists are missing: 'part-01\.tar'\."
            ):
                count(named, order=order, **options)


# -- shards that were cut, counts that were forged, files that are none -------------------------------


@pytest.mark.parametrize(("form", "samples"), [("jsonl", 126), ("npy", 126)])
def test_a_shard_that_was_cut_counts_as_all_the_samples_that_its_manifest_lists(
    write_shards: Any, form: str, samples: int
) -> None:
    folder = write_shards(form)
    build_manifest(folder, folder / "_manifest.json")
    assert count(folder) == samples
    cut = folder / f"part-01.{form}"
    lines = cut.read_bytes().splitlines(keepends=True) if form == "jsonl" else [cut.read_bytes()[:5000]]
    cut.write_bytes(b"".join(lines[:10]))  # of 31, behind a whole line
    for order in (None, pg.order.PartOrder()):
        with pytest.raises(DataError, match=rf"part-01\.{form}'.*was cut short or changed: copy it again"):
            count(folder, order=order)
    with loader_of(folder, pg.Skip(0.5)) as loader:
        assert len(list(loader)) == samples - 31
        assert len(loader.profile().quarantined) == 31
    with loader_of(folder, pg.Skip(0.2)) as loader, pytest.raises(DataError, match="was cut short"):
        list(loader)


# -- links that lead nowhere ---------------------------------------------------------------------------
