"""Data that is not whole is an error that names it, never a shorter epoch."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.cli.app import run
from pipegraph.errors import DataError, GraphError, PipegraphWarning
from pipegraph.storage import Manifest, build_manifest, pack_shards
from pipegraph.storage.folders import list_files
from pipegraph.storage.parts import expand_parts

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
    if state.shards_done == 2:
        raise Stopped


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """The folder of a pack that was stopped behind its second shard."""
    for number in range(SAMPLES):
        (tmp_path / "my photos").mkdir(exist_ok=True)
        (tmp_path / "my photos" / f"{number:02}.txt").write_text(str(number) * 200)
    with pytest.raises(Stopped):
        pack_shards(
            tmp_path / "my photos", tmp_path / "out", size="10 kB", workers=1, shuffle=7, progress=stop
        )
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
    pack_shards(tmp_path / "my photos", unfinished, size="10 kB", workers=1, shuffle=7)
    assert count(unfinished) == SAMPLES


def test_an_unfinished_pack_can_be_read_as_far_as_it_is(unfinished: Path) -> None:
    assert 0 < count(unfinished, missing="skip") < SAMPLES


def test_an_unfinished_writer_is_refused_and_an_unfinished_index_is_not(tmp_path: Path) -> None:
    with pytest.raises(Stopped), pg.ShardWriter(tmp_path / "out", size="1 kB") as writer:
        for number in range(9):
            writer.write({"n": number, "x": bytes(600)})
        raise Stopped
    with pytest.raises(DataError, match="has not ended"):
        count(tmp_path / "out")
    with pg.ShardWriter(tmp_path / "out", size="1 kB") as writer:
        for number in range(writer.written, 9):
            writer.write({"n": number, "x": bytes(600)})
    (tmp_path / "out" / "_manifest.json.partial").write_text('\n{"of": [1], "index": {}}\n')  # of an index
    assert count(tmp_path / "out") == 9


def test_an_unfinished_pack_in_a_store_is_refused(unfinished: Path, upload: Any) -> None:
    url = upload(unfinished)
    for named in (f"{url}/", f"{url}/*.tar"):
        with pytest.raises(
            DataError, match="has not ended.*the call that began it again, and upload all of it"
        ):
            count(named, order=pg.order.PartOrder())
    assert 0 < count(f"{url}/*.tar", order=pg.order.PartOrder(), missing="skip") < SAMPLES


# -- shards that are missing -------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
def test_a_missing_shard_is_an_error_that_names_it(write_shards: Any, given: bool, tmp_path: Path) -> None:
    folder = write_shards("tar")
    build_manifest(folder, (tmp_path / "given.json") if given else folder / "_manifest.json")
    options: dict[str, Any] = {"manifest": tmp_path / "given.json"} if given else {}
    whole = count(folder, **options)
    (folder / "part-01.tar").unlink()
    for named in (folder, f"{folder}/*.tar", [f"{folder}/part-0*.tar"], sorted(folder.glob("*.tar"))):
        for order in (None, pg.order.PartOrder()):
            with pytest.raises(
                DataError, match=r"1 of the 4 shards that .*\.json' lists are missing: 'part-01\.tar'\."
            ):
                count(named, order=order, **options)
    with pytest.raises(DataError, match=r"or read the others with ShardSelect\(missing='skip'\)"):
        count(folder, **options)
    with loader_of(folder, missing="skip", **options) as loader:
        assert "shards that are missing are skipped" in str(loader.plan)
        assert len(list(loader)) == whole - 31
    graph = pg.Graph("said")
    select = graph.add(ops.ShardSelect(folder, missing="skip", **options))
    select.then(ops.Load())
    with graph.loader() as loader:
        list(loader)
    assert "1 missing shards are skipped: 'part-01.tar'" in str(graph.plan())


def test_shards_that_are_there_and_not_named_are_not_missing(write_shards: Any, tmp_path: Path) -> None:
    folder = write_shards("tar")
    other = tmp_path / "other"
    other.mkdir()
    os.rename(folder / "part-03.tar", other / "part-09.tar")
    build_manifest([folder, other], tmp_path / "both.json")
    build_manifest(folder, folder / "_manifest.json")
    assert count(f"{folder}/part-0[01].tar") == 61
    assert count([folder / "part-00.tar", folder / "part-02.tar"]) == 62
    assert count(folder, manifest=tmp_path / "both.json") == 93
    assert count(other, manifest=tmp_path / "both.json") == 33
    (folder / "part-02.tar").unlink()
    with pytest.raises(DataError, match=r"'part-02\.tar'"):  # all that a manifest lists must be there
        count(f"{folder}/part-0[01].tar")
    assert count(f"{folder}/part-0[01].tar", missing="skip") == 61


def test_a_folder_of_which_a_whole_subfolder_is_missing(tmp_path: Path, write_shards: Any) -> None:
    folder = write_shards("tar")
    for number, name in enumerate(("a", "b")):
        (tmp_path / "all" / name).mkdir(parents=True)
        os.rename(folder / f"part-0{number}.tar", tmp_path / "all" / name / "x.tar")
    build_manifest(f"{tmp_path}/all/*/*.tar", tmp_path / "all.json")
    (tmp_path / "all" / "b" / "x.tar").unlink()
    with pytest.raises(DataError, match=r"1 of the 2 shards that .*: 'x\.tar'"):
        count(f"{tmp_path}/all/**/*.tar", manifest=tmp_path / "all.json")


def test_a_missing_object_is_an_error_that_names_it(write_shards: Any, upload: Any) -> None:
    folder = write_shards("tar")
    build_manifest(folder, folder / "_manifest.json")
    (folder / "part-02.tar").unlink()
    url = upload(folder)
    for named in (f"{url}/", f"{url}/part-*.tar"):
        for order in (None, pg.order.PartOrder()):
            with pytest.raises(DataError, match=r"1 of the 4 shards that 'memory://.*: 'part-02\.tar'"):
                count(named, order=order)
    assert count(f"{url}/", missing="skip") == 94
    assert count(f"{url}/part-{{00..01}}.tar") == 61


def test_missing_is_one_of_two() -> None:
    with pytest.raises(GraphError, match="ShardSelect: missing must be 'error' or 'skip', got True"):
        ops.ShardSelect("x", missing=True)  # type: ignore[arg-type]


# -- side files --------------------------------------------------------------------------------------


def test_a_manifest_named_absolutely_serves_for_parts_named_relatively(
    write_shards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_shards("tar")
    for number, name in enumerate(("a", "b")):  # two parts of one name
        (tmp_path / "all" / name).mkdir(parents=True)
        os.rename(folder / f"part-0{number}.tar", tmp_path / "all" / name / "x.tar")
    build_manifest(f"{tmp_path}/all/*/*.tar", tmp_path / "all.json")
    monkeypatch.chdir(tmp_path)
    assert count("all/*/*.tar", manifest=tmp_path / "all.json") == 61
    assert count(f"{tmp_path}/all/*/*.tar", manifest="all.json") == 61


def test_others_read_a_folder_of_our_parquet_shards(tmp_path: Path) -> None:
    dataset = pytest.importorskip("pyarrow.dataset")
    pack_shards([{"n": n} for n in range(50)], tmp_path / "out", format="parquet", workers=1)
    assert dataset.dataset(tmp_path / "out").count_rows() == 50
    pandas = pytest.importorskip("pandas")
    assert len(pandas.read_parquet(tmp_path / "out")) == 50


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


def test_forged_sample_counts_are_refused(write_shards: Any) -> None:
    folder = write_shards("tar")
    manifest = build_manifest(folder)
    records = [manifest.record(number) for number in range(4)]
    for record in records:
        record["samples"] = [2**62]  # four of them are 0 in int64
    with pytest.raises(
        DataError, match=r"part-00\.tar: a block of 4611686018427387904 samples, but no dataset has"
    ):
        Manifest.from_records(records)


def test_a_pipe_is_neither_packed_nor_a_shard(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "files" / "b.txt")
    with pytest.raises(DataError, match=r"b\.txt' is no regular file \(a pipe"):
        pack_shards(tmp_path / "files", tmp_path / "out", workers=1)
    os.mkfifo(tmp_path / "b.tar")
    with pytest.raises(DataError, match=r"b\.tar' is a pipe or device, not a shard"):
        count(tmp_path / "b.tar")


@pytest.mark.parametrize("ending", [0, 5])
def test_a_rank_has_as_many_samples_as_the_loader_says_where_the_seed_deals_whole_parts(ending, tmp_path):
    for number, count in enumerate((3, 17, 90, 40)):
        np.save(tmp_path / f"s-{number}.npy", np.arange(count))
    parts = str(tmp_path / "s-*.npy")
    build_manifest(parts, str(tmp_path / "m.json"))
    for seed in (ending, ending + 1, ending + 2):
        graph = pg.Graph("parts", seed=seed)
        select = ops.ShardSelect(parts, order=pg.order.PartOrder(), manifest=str(tmp_path / "m.json"))
        graph.add(select).then(ops.Load()).then(ops.Shuffle(5))
        with graph.loader(rank=0, world_size=2, epochs=2) as loader:
            for _ in range(2):
                expected = len(loader)
                assert sum(1 for _ in loader) == expected


# -- links that lead nowhere ---------------------------------------------------------------------------


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder of three shards, the middle one a link to a file that is not there."""
    folder = tmp_path / "d"
    folder.mkdir()
    for number in (0, 2):
        (folder / f"s-{number}.jsonl").write_text('{"x": 1}\n')
    (folder / "s-1.jsonl").symlink_to("gone/s-1.jsonl")
    return folder


NOWHERE = r"s-1\.jsonl' is a link to 'gone/s-1\.jsonl', which is not there"


@pytest.mark.parametrize("named", ["", "*.jsonl", "**/*.jsonl", "s-{0..2}.jsonl", "s-1.jsonl"])
def test_a_shard_that_is_a_broken_link_is_refused_with_where_it_points(linked: Path, named: str) -> None:
    with pytest.raises(DataError, match=NOWHERE):
        count(str(linked / named) if named else linked)


def test_a_broken_link_is_skipped_where_missing_shards_are(linked: Path) -> None:
    assert count(linked, missing="skip") == count(f"{linked}/*.jsonl", missing="skip") == 2


def test_broken_links_beside_the_shards_are_no_matter(linked: Path) -> None:
    (linked / "s-1.jsonl").unlink()
    for name in ("README.md", "latest.txt", ".s-1.jsonl"):
        (linked / name).symlink_to("gone")
    assert count(linked) == count(f"{linked}/*.jsonl") == count(f"{linked}/**/*.jsonl") == 2


def test_a_class_folder_that_is_a_broken_link_is_refused_and_a_file_fails_where_it_is_read(
    tmp_path: Path,
) -> None:
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(b"1")
    (tmp_path / "dogs" / "2.jpg").symlink_to("gone.jpg")
    (tmp_path / "README").symlink_to("gone")
    assert len(list_files(tmp_path)) == 3
    (tmp_path / "owls").symlink_to("/gone/owls")
    for pattern in (None, "*.jpg"):
        with pytest.raises(DataError, match=r"owls' is a link to '/gone/owls'.*mend the link, or remove it"):
            list_files(tmp_path, pattern)


# -- folders that may not be read ----------------------------------------------------------------------


@pytest.fixture(params=["list", "enter"])
def closed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two folders with a shard each, of which this user may not list or not enter the second.

    Whoever runs the tests may be the administrator, whom no mode stops: the calls refuse instead.
    """
    for name in ("a", "b", "lost+found"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "s-0.jsonl").write_text('{"x": 1}\n')
    shut = [str(tmp_path / "b"), str(tmp_path / "lost+found")]
    scandir, access = os.scandir, os.access

    def refuse_list(path: Any = ".") -> Any:
        if str(path).rstrip("/") in shut:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    def refuse_entry(path: Any, mode: int, **others: Any) -> bool:
        return str(path).rstrip("/") not in shut and access(path, mode, **others)

    if request.param == "list":
        monkeypatch.setattr(os, "scandir", refuse_list)
    else:
        monkeypatch.setattr(os, "access", refuse_entry)
    return tmp_path


@pytest.mark.parametrize("closed", ["list"], indirect=True)
def test_a_folder_of_files_with_a_folder_that_may_not_be_listed_is_refused(closed: Path) -> None:
    with pytest.raises(
        DataError, match=r"b' cannot be searched \(Permission denied\): its files would be missing"
    ):
        list_files(closed)


def test_a_pack_names_a_broken_link(linked: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"s-1\.jsonl', which is a link to 'gone/s-1\.jsonl': No such file"):
        pack_shards(linked, tmp_path / "out")


def test_shards_beside_folders_with_more_shards_are_said_with_the_pattern_of_both(
    write_shards: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    folder = write_shards("tar")
    alone = count(folder)
    (folder / "_old").mkdir()
    (folder / "notes").mkdir()
    (folder / "_old" / "part-00.tar").write_bytes((folder / "part-00.tar").read_bytes())
    assert count(folder) == alone and not recwarn.list
    (folder / "more").mkdir()
    (folder / "more" / "part-07.tar").write_bytes((folder / "part-00.tar").read_bytes())
    with pytest.warns(PipegraphWarning, match="not those in its subfolders, such as 'more'") as warned:
        assert count(folder) == alone
    (said,) = warned
    both, these = re.findall(r"by '(.*?)'", str(said.message))
    assert count(these) == alone < count(folder / "more") + alone == count([these, folder / "more"])
    assert f"{folder}/more/part-07.tar" in [part.uri for part in expand_parts(both)]


@pytest.mark.parametrize("order", [pg.order.LaneOrder(), pg.order.PartOrder()])
def test_a_folder_of_a_store_without_its_slash_is_told_so(order: Any) -> None:
    with pytest.raises(
        (DataError, GraphError), match=r"'a'.* a folder's URL ends in a slash: 'memory://slash/a/'"
    ):
        count("memory://slash/a", order=order)


def test_a_shard_of_a_store_without_a_manifest_is_not_taken_for_a_folder() -> None:
    with pytest.raises(GraphError, match="need a manifest") as refused:
        count("memory://slash/a.tar")
    assert "slash:" not in str(refused.value)
