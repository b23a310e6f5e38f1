"""Threads on systems without POSIX: what Windows and macOS lack is hidden, in a process of its own."""

import subprocess
import sys

import pytest

HIDE = """
import contextlib, os, signal, socket, sys
import torch, numpy  # which know their systems themselves
with contextlib.suppress(ImportError):
    import optree  # which torch uses where it is installed

for name in {modules}:
    sys.modules[name] = None
for name in {of_os}:
    if hasattr(os, name):
        delattr(os, name)
for name in {of_signal}:
    if hasattr(signal, name):
        delattr(signal, name)
"""
TEXT_UNLESS_BINARY = """
os.O_BINARY, text = 1 << 30, set()
def opened(path, flags, *args, _open=os.open, **named):
    fd = _open(path, flags & ~os.O_BINARY, *args, **named)
    (text.discard if flags & os.O_BINARY else text.add)(fd)
    return fd
def found(fd, nbytes, _read=os.read):
    raw = _read(fd, nbytes)
    return raw.replace(b"\\r\\n", b"\\n").partition(b"\\x1a")[0] if fd in text else raw
os.open, os.read = opened, found
"""
"""Windows changes what is read from a file that was not opened as binary."""

RUN = """
import pathlib, textwrap, traceback
if hasattr(os, "process_cpu_count"):  # new in Python 3.13; where there is no affinity, that of all cores
    os.process_cpu_count = os.cpu_count
import pipegraph as pg
from pipegraph import operators as ops

failed = 0
for title, graph in {graphs}.items():
    folder = pathlib.Path({folder!r}, title)
    folder.mkdir()
    try:
        exec(textwrap.dedent(graph))
    except BaseException:
        failed += 1
        print(title, traceback.format_exc(), sep="\\n", file=sys.stderr)
sys.exit(failed)
"""
HIDDEN = {
    "Windows": {
        "modules": ["fcntl", "resource", "termios", "tty", "pwd", "grp", "posix", "_posixsubprocess", "readline"],
        "of_os": [
            "register_at_fork", "fork", "forkpty", "pread", "preadv", "pwrite", "O_CLOEXEC", "O_DIRECTORY", "O_NONBLOCK", "O_PATH",
            "sched_getaffinity", "memfd_create", "eventfd", "pidfd_open", "posix_fallocate", "posix_fadvise", "getuid",
            "geteuid", "killpg", "getpgid", "mkfifo", "sysconf", "uname", "wait4", "waitid", "fdatasync", "getloadavg",
        ],
        "of_signal": ["SIGKILL", "SIGCHLD", "SIGURG", "SIGALRM", "SIGHUP", "SIGUSR1", "pthread_sigmask", "setitimer", "SIGWINCH", "siginterrupt"],
    },
    "macOS": {
        "modules": [],
        "of_os": ["sched_getaffinity", "memfd_create", "eventfd", "pidfd_open", "posix_fallocate", "posix_fadvise", "O_PATH", "preadv"],
        "of_signal": [],
    },
}  # fmt: skip
GRAPHS = {
    "data in memory": """
        graph = pg.Graph(seed=1)
        graph.add(ops.FromSequence(list(range(40)), shuffle=True)).then(ops.Map(lambda x: x + 1), workers=2).then(ops.Batch(8))
        with graph.loader() as loader:
            assert sorted(int(x) for batch in loader for x in batch) == list(range(1, 41))
            state = loader.state_dict()
            print(loader.profile())
    """,
    "an iterable": """
        graph = pg.Graph()
        graph.add(ops.FromIterable(lambda: iter(range(40)), shard=False)).then(ops.Filter(lambda x: x % 2), workers=2)
        assert list(graph.loader()) == list(range(1, 40, 2))
    """,
    "files in a folder": """
        (folder / "a").mkdir()
        for i in range(20):
            (folder / "a" / f"{i}.txt").write_bytes(b"%d\\r\\n\\x1a" % i)
        graph = pg.Graph()
        graph.add(ops.ListFiles(folder)).then(ops.Load(), workers=2)
        found = [value for sample in graph.loader() for value in sample.values() if isinstance(value, bytes)]
        assert sorted(found) == sorted(b"%d\\r\\n\\x1a" % i for i in range(20)), found
    """,
    "local shards": """
        (folder / "a.jsonl").write_bytes(b"".join(b'{"x": %d}\\n' % i for i in range(20)))
        graph = pg.Graph()
        graph.add(ops.ShardSelect([folder / "a.jsonl"])).then(ops.Load(), workers=2)
        assert sorted(sample["x"] for sample in graph.loader()) == list(range(20))
    """,
    "an index": """
        (folder / "a.jsonl").write_bytes(b'{"x": 1}\\n' * 20)
        manifest = pg.storage.build_manifest([str(folder / "a.jsonl")])
        assert sum(manifest.part_samples) == 20
    """,
    "a cache": """
        (folder / "a.jsonl").write_bytes(b"".join(b'{"x": %d}\\n' % i for i in range(20)))
        graph = pg.Graph()
        try:
            cached = ops.Load(cache=pg.NodeCache(folder / "cache", "1 MB"))
            graph.add(ops.ShardSelect([folder / "a.jsonl"])).then(cached, workers=2)
            assert len(list(graph.loader())) == 20
        except pg.errors.PipegraphError as error:
            assert "flock" in str(error), error
    """,
    "packing": """
        (folder / "in").mkdir()
        for i in range(5):
            (folder / "in" / f"{i}.txt").write_bytes(b"abc")
        from pipegraph.storage import pack_shards
        try:
            pack_shards(folder / "in", folder / "out")
        except pg.errors.PipegraphError as error:
            assert "flock" in str(error), error
    """,
    "pg.DataLoader": """
        class Squares(torch.utils.data.Dataset):
            def __len__(self): return 40
            def __getitem__(self, i): return i * i
        loader = pg.DataLoader(Squares(), batch_size=8, shuffle=True)
        assert sorted(int(x) for batch in loader for x in batch) == [i * i for i in range(40)]
        loader = pg.DataLoader(Squares(), batch_size=8, num_workers=2, workers="thread")
        assert [int(x) for batch in loader for x in batch] == [i * i for i in range(40)]
    """,
    "replicas": """
        model = torch.nn.Linear(4, 2)
        with pg.replicas.ReplicaExecutor(model, ["cpu", "cpu"]) as executor:
            assert executor(torch.ones(6, 4)).shape == (6, 2)
    """,
    "processes are refused with the remedy": """
        graph = pg.Graph()
        graph.add(ops.FromSequence(list(range(40)))).then(ops.Map(abs), workers=2, backend="process")
        try:
            list(graph.loader())
        except pg.errors.PipegraphError as error:
            assert "thread" in str(error), error
        else:
            raise AssertionError("no error")
    """,
    "the command line": """
        from pipegraph.cli import main
        sys.argv = ["pipegraph", "doctor"]
        try:
            assert not main()
        except SystemExit as end:
            assert not end.code, end.code
    """,
}


@pytest.mark.parametrize("system", HIDDEN)
def test_graphs_run_where_a_system_lacks_what_linux_has(system, tmp_path):
    """One process runs them all, so that torch is imported once."""
    text = TEXT_UNLESS_BINARY if system == "Windows" else ""
    program = HIDE.format(**HIDDEN[system]) + text + RUN.format(graphs=GRAPHS, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
