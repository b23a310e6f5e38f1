"""Tar shards: grouping, names of every flavour, index and random access."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from pipegraph.storage.formats import format_of
from pipegraph.storage.formats.tar import split_key
from pipegraph.storage.shard_files import BytesFile, LocalFile

MakeTar = Callable[..., Path]
TAR = format_of("a.tar")


def samples(path: Path) -> list[dict[str, object]]:
    with LocalFile(path) as file:
        return list(TAR.samples(file))


def test_files_that_share_the_name_up_to_the_first_dot_are_one_sample(make_tar: MakeTar) -> None:
    path = make_tar(
        [("d.x/a.jpg", b"A"), ("d.x/a.seg.PNG", b"S"), ("d.x/a.cls", b" 7\n"), ("d.x/b.jpg", b"B")]
    )
    assert samples(path) == [
        {"key": "d.x/a", "jpg": b"A", "seg.png": b"S", "label": 7},
        {"key": "d.x/b", "jpg": b"B"},
    ]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_writer_s_long_names_are_read(make_tar: MakeTar, form: int) -> None:
    long = "/".join(["d" * 50] * 4) + "/" + "n" * 40
    assert [{"key": long, "txt": b"x" * 700}] == samples(make_tar([(long + ".txt", b"x" * 700)], form=form))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_that_are_not_ascii_are_read(make_tar: MakeTar, form: int) -> None:
    name = "größe/" + "名" * 60
    assert [{"key": name, "txt": b"1"}] == samples(make_tar([(name + ".txt", b"1")], form=form))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    sizes=st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=3), max_size=30),
    form=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    block=st.integers(1, 20_000),
    chunk=st.sampled_from([512, 1024, 5000, 1 << 18]),
)
def test_stream_blocks_and_random_access_agree_with_python_s_tarfile(
    tmp_path: Path, sizes: list[list[int]], form: int, block: int, chunk: int
) -> None:
    buffer = io.BytesIO()
    expected: list[dict[str, object]] = []
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for i, fields in enumerate(sizes):
            if i % 4 == 3:
                folder = tarfile.TarInfo(f"dir{i}")
                folder.type = tarfile.DIRTYPE
                archive.addfile(folder)
            expected.append({"key": f"{i:03d}" + "k" * (i if form == tarfile.USTAR_FORMAT else i * 11)})
            for j, size in enumerate(fields):
                data = bytes([i + j]) * size
                info = tarfile.TarInfo(f"{expected[-1]['key']}.f{j}")
                info.size = size
                archive.addfile(info, io.BytesIO(data))
                expected[-1][f"f{j}"] = data
    file = BytesFile(buffer.getvalue())
    file.stream_nbytes = chunk
    assert expected == list(TAR.samples(file))

    blocks = list(TAR.index(file, block))
    assert len(expected) == sum(b.samples for b in blocks)
    assert all(b.nbytes <= block or b.samples == 1 for b in blocks)
    read = [TAR.read(file, b) for b in blocks]
    assert expected == [sample for one in read for sample in one]
    assert all(list(reversed(one)) == [one[i] for i in reversed(range(len(one)))] for one in read)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("a.jpg", ("a", "jpg")),
        ("././a.jpg", ("././a", "jpg")),  # as WebDataset's keys
        ("a", None),
        ("a.", None),
        ("__m__/a.json", None),
    ],
)
def test_a_name_splits_at_the_first_dot_of_its_last_component(
    name: str, split: tuple[str, str] | None
) -> None:
    assert split == split_key(name)
