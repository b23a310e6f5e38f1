"""Tar shards: grouping, names of every flavour, index and random access."""

import io
import itertools
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import DataError, ShardError
from pipegraph.storage.formats import format_of
from pipegraph.storage.formats.tar import split_key
from pipegraph.storage.shard_files import BytesFile, LocalFile, OverlayFile

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


def test_files_that_belong_to_no_sample_are_passed_over(make_tar: MakeTar) -> None:
    path = make_tar(
        [
            ("README", b"r"),
            (".hidden", b"h"),
            ("__meta__/x.json", b"m"),
            ("./a.txt", b"A"),
            ("a/.b.txt", b"B"),
        ]
    )
    assert samples(path) == [{"key": "./a", "txt": b"A"}]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_writer_s_long_names_are_read(make_tar: MakeTar, form: int) -> None:
    long = "/".join(["d" * 50] * 4) + "/" + "n" * 40
    assert [{"key": long, "txt": b"x" * 700}] == samples(make_tar([(long + ".txt", b"x" * 700)], form=form))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_that_are_not_ascii_are_read(make_tar: MakeTar, form: int) -> None:
    name = "größe/" + "名" * 60
    assert [{"key": name, "txt": b"1"}] == samples(make_tar([(name + ".txt", b"1")], form=form))


def test_base_256_sizes_are_read() -> None:
    data = b"0" * 513
    info = tarfile.TarInfo("a.bin")
    info.size = len(data)
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + len(data).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    archive = bytes(header) + data + bytes(511) + bytes(1024)
    assert [{"key": "a", "bin": data}] == list(TAR.samples(BytesFile(archive)))


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


def test_a_block_is_read_from_its_own_bytes_alone(make_tar: MakeTar, tmp_path: Path) -> None:
    path = make_tar([(f"{i:03d}.txt", bytes([i]) * 600) for i in range(50)])
    with LocalFile(path) as whole:
        blocks = list(TAR.index(whole, 5000))
        assert len(blocks) > 3
        block = blocks[2]
        cached = tmp_path / "block"
        cached.write_bytes(whole.read_at(block.offset, block.nbytes))
        with OverlayFile(BytesFile(bytes(whole.size)), block.offset, LocalFile(cached)) as file:
            assert list(TAR.read(whole, block)) == list(TAR.read(file, block))


def test_neighbouring_blocks_leave_no_sample_out(make_tar: MakeTar) -> None:
    path = make_tar([(f"{i:03d}.{f}", b"x" * (i * 37 % 900)) for i in range(200) for f in ("a", "b")])
    with LocalFile(path) as file:
        blocks = list(TAR.index(file, 10_000))
        for before, after in itertools.pairwise(blocks):
            assert before.first + before.samples == after.first
            assert before.offset + before.nbytes == after.offset


def test_an_index_of_another_file_is_refused(make_tar: MakeTar) -> None:
    one = make_tar([(f"{i}.txt", b"x" * 100) for i in range(9)], "one.tar")
    other = make_tar([(f"{i // 3}.t{i}", b"x" * 100) for i in range(9)], "other.tar")
    with LocalFile(one) as a, LocalFile(other) as b, pytest.raises(ShardError, match="make the index anew"):
        TAR.read(b, next(TAR.index(a)))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("a.jpg", ("a", "jpg")),
        ("x.y/a.b.C", ("x.y/a", "b.c")),
        ("././a.jpg", ("././a", "jpg")),  # as WebDataset's keys
        (".a.jpg", None),
        ("a", None),
        ("a.", None),
        ("__meta__.json", ("__meta__", "json")),
        ("__m__/a.json", None),
    ],
)
def test_a_name_splits_at_the_first_dot_of_its_last_component(
    name: str, split: tuple[str, str] | None
) -> None:
    assert split == split_key(name)


def test_a_class_that_is_no_number_stays_text(make_tar: MakeTar) -> None:
    files = [
        ("a.cls", b"cat"),
        ("b.cls", b"7"),
        ("c.cls", b"9" * 30),
        ("d.cls", b"1_000"),
        ("e.cls", b" -12\n"),
    ]
    assert samples(make_tar(files)) == [
        {"key": "a", "cls": b"cat"},
        {"key": "b", "label": 7},
        {"key": "c", "cls": b"9" * 30},
        {"key": "d", "cls": b"1_000"},
        {"key": "e", "label": -12},
    ]


def test_a_batch_of_numbered_and_named_classes_says_which_fields_differ(make_tar: MakeTar) -> None:
    mixed = samples(make_tar([("a.cls", b"cat"), ("b.cls", b"7")]))
    graph = pg.Graph("classes")
    graph.add(ops.FromIterable(mixed)).then(ops.Batch(2))
    with (
        graph.loader() as loader,
        pytest.raises(DataError, match="sample 1 and sample 0 differ in cls, label"),
    ):
        list(loader)


def test_a_file_named_key_is_no_second_key(make_tar: MakeTar) -> None:
    assert samples(make_tar([("a.key", b"k"), ("a.txt", b"t")])) == [{"key": "a", "_key": b"k", "txt": b"t"}]


def test_archives_laid_end_to_end_are_not_cut_in_silence(make_tar: MakeTar) -> None:
    one, two = make_tar([("a.txt", b"a")], "one.tar"), make_tar([("b.txt", b"b")], "two.tar")
    with open(one, "ab") as file:
        file.write(two.read_bytes())
    with pytest.raises(ShardError, match=r"one\.tar: more follows .*concatenated"):
        samples(one)
    with LocalFile(one) as shard, pytest.raises(ShardError, match="more follows"):
        list(TAR.index(shard))


def test_a_label_beside_a_class_says_which_two_collide(make_tar: MakeTar) -> None:
    path = make_tar([("a.label", b"x"), ("a.cls", b"7")])
    message = r"'label' twice .*a whole number in \.cls is the label"
    with LocalFile(path) as file, pytest.raises(ShardError, match=message):
        list(format_of(file.name).samples(file))
