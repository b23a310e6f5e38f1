"""The command line as a user meets it: what it prints, and that bad input is one line and exit code 2."""

import json
import pathlib
import re
import sys
import textwrap
import threading

import pytest

from pipegraph.cli import main
from pipegraph.cli.commands import ProgressLine

PIPELINE = """
import pipegraph as pg
from pipegraph import operators as ops

graph = pg.Graph("squares")
graph.add(ops.FromIterable(range(1000)), name="numbers").then(lambda x: x * x, name="square")

def build():
    return graph

def takes(argument):
    return graph

two = pg.Graph("two")
source = two.add(ops.FromSequence(range(100)), name="source")
left = source.then(lambda x: x, name="left")
right = source.then(lambda x: -x, name="right")

failing = pg.Graph("failing")
failing.add(ops.FromIterable(range(10)), name="numbers").then(lambda x: 1 // (x - 5), name="divide")

images = pg.Graph("images")
images.add(ops.FromIterable([]), name="numbers").then(ops.DecodeImage(8))

nothing = pg.Graph("nothing")
nothing.add(ops.FromIterable([]), name="numbers")

number = 3
"""


@pytest.fixture
def pipeline(tmp_path):
    path = tmp_path / "train_pipeline.py"
    path.write_text(textwrap.dedent(PIPELINE))
    yield str(path)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]
    sys.modules.pop("train_pipeline", None)


@pytest.fixture
def timed_from_the_first_batch(monkeypatch):
    """The seconds that a run takes begin with its first batch: on a busy machine none may come within them."""
    came, reach = threading.Event(), ProgressLine.reach

    class Clock(threading.Timer):
        def run(self):
            came.wait()
            super().run()

        def cancel(self):
            super().cancel()
            came.set()

    def comes(self, *given):
        reach(self, *given)
        came.set()

    monkeypatch.setattr(ProgressLine, "reach", comes)
    monkeypatch.setattr(threading, "Timer", Clock)


def printed(capsys):
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured


def test_the_version_is_that_of_the_package(capsys):
    import pipegraph

    assert main(["--version"]) == 0
    assert printed(capsys).out == f"pipegraph {pipegraph.__version__}\n"


def test_plan_prints_what_would_run(pipeline, capsys):
    assert main(["plan", f"{pipeline}:graph"]) == 0
    out = printed(capsys).out
    assert "plan of graph 'squares'" in out
    assert "square" in out


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere.py:graph", "there is no file 'nowhere.py'"),
        ("{file}", "expected a Python file and a name in it, such as train.py:graph"),
        ("{file}:", "expected a Python file and a name in it, such as train.py:graph"),
        ("train", "expected a Python file and a name in it, such as train.py:graph"),
        ("{file}:absent", "has no 'absent'"),
        ("{file}:number", "is of type int, no graph and no function that returns one"),
        ("{file}:two", "has 2 sinks (left, right): name one with output= (on the command line: --output)"),
    ],
)
def test_a_wrong_target_is_one_line_and_exit_code_2(pipeline, capsys, target, said):
    assert main(["plan", target.format(file=pipeline)]) == 2
    captured = printed(capsys)
    assert said.format(file=pipeline) in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_file_that_fails_names_its_line(tmp_path, capsys):
    path = tmp_path / "broken_pipeline.py"
    path.write_text("x = 1\ny = x / 0\n")
    assert main(["plan", f"{path}:graph"]) == 1
    assert re.search(r"ZeroDivisionError at \S*broken_pipeline\.py:2: division by zero", printed(capsys).err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["plan"],
        ["plan", "--colour"],
        ["profile", "x.py:graph", "--seconds", "soon"],
        ["profile", "x.py:graph", "--seconds", "0"],
        ["demo", "--epochs", "0"],
        ["index"],
        ["demo", "--data", "no/such/folder"],
        ["index", "no-such-shard.tar"],
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, capsys):
    assert main(arguments) == 2
    captured = printed(capsys)
    assert captured.err.startswith("pipegraph: ")
    assert captured.err.count("\n") == 1


def test_tune_prints_settings_that_can_be_pasted(pipeline, capsys):
    assert main(["tune", f"{pipeline}:graph", "--seconds", "1"]) == 0
    found = printed(capsys)
    assert found.out.startswith("graph.resize({")
    assert " decision" in found.err  # one, or more of them, as fast as the machine is
    spaces = {"__name__": "pasted"}
    exec(compile(pathlib.Path(pipeline).read_text() + "\n" + found.out, "pasted.py", "exec"), spaces)
    assert all(not spec.tuned for spec in spaces["graph"].stages.values())


@pytest.mark.usefixtures("timed_from_the_first_batch")
def test_profile_runs_for_the_seconds_given_and_prints_the_table(pipeline, capsys):
    assert main(["profile", f"{pipeline}:graph", "--seconds", "0.3"]) == 0
    out = " ".join(printed(capsys).out.split())
    assert "profile of 'squares'" in out
    assert any(words in out for words in ("holds training back", "sets the pace", "comes in bursts"))


@pytest.mark.usefixtures("timed_from_the_first_batch")
def test_profile_as_json_prints_nothing_else(pipeline, capsys):
    assert main(["profile", f"{pipeline}:graph", "--seconds", "0.2", "--json"]) == 0
    found = json.loads(printed(capsys).out)
    assert {"numbers", "square"} == set(found["stages"])
    assert found["items"] > 0


def test_an_error_in_the_users_function_is_told_with_its_sample_and_exit_code_1(pipeline, capsys):
    assert main(["profile", f"{pipeline}:failing", "--seconds", "5"]) == 1
    err = printed(capsys).err
    assert re.search(r"ZeroDivisionError at \S*train_pipeline\.py:\d+: ", err)
    assert "stage 'divide', sample 5 at position 5" in err
    assert err.count("\n") == 1


def test_index_writes_a_manifest_that_any_order_can_use(tmp_path, capsys):
    import tarfile

    from pipegraph.storage import Manifest

    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(3):
            file = tmp_path / f"{number}.txt"
            file.write_text(str(number))
            tar.add(file, f"{number}.txt")
    out = tmp_path / "a.manifest.json"
    assert main(["index", str(tmp_path / "*.tar"), "--out", str(out)]) == 0
    assert "3 samples in 1 shard (" in printed(capsys).out
    assert len(Manifest.load(out)) == 3


def test_index_writes_where_graphs_look_for_it_and_folders_are_their_shards(tmp_path, monkeypatch, capsys):
    from pipegraph.storage import Manifest, build_manifest
    from pipegraph.storage.stores import StoreClient

    (tmp_path / "shards").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "shards" / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    for _ in range(2):  # the second time the manifest lies there
        assert main(["index", str(tmp_path / "shards")]) == 0
    assert len(Manifest.load(tmp_path / "shards" / "_manifest.json")) == 2
    pytest.importorskip("obstore")
    with StoreClient() as store:
        store.put("memory://beside/set/a.jsonl", b'{"n": 1}\n')
        for _ in range(2):
            assert main(["index", "memory://beside/set/"]) == 0
        assert len(Manifest.load("memory://beside/set/_manifest.json", store)) == 1
        assert len(build_manifest("memory://beside/set/", store={})) == 1
        store.put("memory://beside/notes/readme.txt", b"no shard")
        assert main(["index", "memory://beside/notes/"]) == 2
        assert "no shard (" in printed(capsys).err
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "b.jsonl").write_text('{"n": 3}\n')
    assert main(["index", str(tmp_path / "shards"), str(tmp_path / "b.jsonl")]) == 0
    assert len(Manifest.load("_manifest.json")) == 3


def test_doctor_names_the_machine_and_the_install_line_of_what_is_missing(monkeypatch, capsys):
    from importlib import metadata

    found = metadata.version

    def version(name):
        if name == "obstore":
            raise metadata.PackageNotFoundError
        return found(name)

    monkeypatch.setattr(metadata, "version", version)
    assert main(["doctor"]) == 0
    out = printed(capsys).out
    for word in (
        "cores",
        "memory",
        "processes   backend='process' works",
        "open files",
        "devices",
        "torch",
        "python",
        "decoder     auto: ",
    ):
        assert f"\n{word}" in f"\n{out}"
    assert 'missing: pip install "obstore>=' in out


def test_ctrl_c_ends_with_130_and_no_traceback(pipeline, programs):
    # A build() that tells that it was reached: the signal must not come before Python listens to it.
    with open(pipeline, "a") as file:
        file.write("\ndef build():\n    print('ready', flush=True)\n    return graph\n")
    program = "import sys; from pipegraph.cli import main; sys.exit(main())"
    with programs.start(program, "profile", f"{pipeline}:build", "--seconds", 100) as process:
        assert process.readline() == "ready\n"
        process.readline()  # the progress line: the pass is about to begin
        process.interrupt()
        out, err = process.communicate()
    assert process.returncode == 130, (out, err)
    assert err == "pipegraph: interrupted\n"
