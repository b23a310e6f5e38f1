"""From what a user writes to a list of parts."""

from pathlib import Path

import pytest

from pipegraph.errors import DataError
from pipegraph.storage.parts import Part, expand_parts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(12):
        (tmp_path / f"part-{i:05d}.tar").write_bytes(b"x" * i)
    (tmp_path / "notes.txt").write_text("not a shard")
    (tmp_path / "odd[1].tar").write_bytes(b"odd")
    return tmp_path


def names(parts: list[Part]) -> list[str]:
    return [p.name for p in parts]


def test_a_glob_gives_the_matching_files_sorted_with_their_sizes(folder: Path) -> None:
    parts = expand_parts(str(folder / "part-*.tar"))
    assert [f"part-{i:05d}.tar" for i in range(12)] == names(parts)
    assert list(range(12)) == [p.size for p in parts]


def test_a_folder_gives_the_files_with_a_known_suffix(folder: Path) -> None:
    assert len(expand_parts(folder)) == 13
    assert "notes.txt" not in names(expand_parts(folder))


def test_a_brace_range_keeps_its_zero_padding_and_its_order(folder: Path) -> None:
    assert names(expand_parts(str(folder / "part-{00009..00010}.tar"))) == [
        "part-00009.tar",
        "part-00010.tar",
    ]


def test_a_list_keeps_its_order_and_may_mix_patterns_paths_and_parts(folder: Path) -> None:
    parts = expand_parts(
        [folder / "part-00003.tar", str(folder / "part-0000{1..2}.tar"), Part("s3://b/x.tar", 7)]
    )
    assert names(parts) == ["part-00003.tar", "part-00001.tar", "part-00002.tar", "x.tar"]


def test_a_file_url_is_a_local_path(folder: Path) -> None:
    assert [p.size for p in expand_parts(f"file://{folder}/part-00005.tar")] == [5]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("none-*.tar", "no file matches 'none-*.tar' in folder"),
        ("part-{00010..00012}.tar", "no shard 'part-00012.tar' in folder"),
        ("part-{5..1}.tar", "runs backwards; write {1..5}"),
        ("part-{1..99999999999}.tar", "names more than"),
        ("part-{x}.tar", "neither a range"),
        ("part-{0..1.tar", "braces must be closed"),
    ],
)
def test_what_cannot_be_found_is_an_error_that_names_pattern_and_folder(
    folder: Path, pattern: str, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        expand_parts(str(folder / pattern))
    assert message in str(caught.value)
    assert pattern in str(caught.value)
    assert str(folder) in str(caught.value)
