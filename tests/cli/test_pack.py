"""``pipegraph pack`` on the command line."""

import re
from pathlib import Path

import pytest

from pipegraph.cli.app import run
from pipegraph.storage.manifest import Manifest


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        path = tmp_path / "files" / "ab"[number % 2] / f"{number:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number) * 300)
    return tmp_path


def pack(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run(["pack", *arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_a_folder_is_packed_and_a_second_run_says_that_it_is_complete(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for again in (False, True):
        code, out, err = pack("files", "out", "--size", "10kB", capsys=capsys)
        assert (code, err) == (0, "")
        assert re.search(r"20 samples in \d shards", out)
        assert out.endswith(": out was complete, nothing was written\n" if again else ": out\n")
    assert len(Manifest.load("out/_manifest.json")) == 20


def test_a_function_and_a_shuffle(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "convert.py").write_text("def samples():\n    return ({'n': n} for n in range(7))\n")
    code, out, _ = pack("convert.py:samples", "made", "--format", "parquet", capsys=capsys)
    assert code == 0
    assert "7 samples in 1 shard (" in out
    code, out, _ = pack("files", "mixed", "--format", "parquet", "--shuffle", "--seed", "3", capsys=capsys)
    assert code == 0
    assert (files / "mixed" / "_manifest.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "out"], "'nothing': there is no such folder"),
        (["fils/", "out"], "'fils/': there is no such folder"),
        (["files", "out", "--format", "zip"], "format must be one of tar, parquet, got 'zip'"),
        (["files", "out", "--size", "many"], "size must be bytes or a size such as"),
        (["convert.py:absent", "out"], "there is no file 'convert.py'"),
        (["graph.py:graph", "out"], "graph.py:graph is a graph; give a function that yields samples"),
    ],
)
def test_errors_are_one_line_with_the_remedy(
    files: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (files / "graph.py").write_text("import pipegraph as pg\ngraph = pg.Graph('g')\n")
    code, _, err = pack(*arguments, capsys=capsys)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = pack("--help", capsys=capsys)
    assert code == 0
    assert "pipegraph pack photos/ shards/" in " ".join(out.split())
