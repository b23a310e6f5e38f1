"""Programs that run without standard input, output or error, as daemons do."""

from itertools import combinations

import pytest

PROGRAM = """
import faulthandler, os, signal, sys, threading
import pipegraph as pg
from pipegraph import operators as ops

closed, interpreter, when, found = sys.argv[1], sys.argv[2] == "True", sys.argv[3], sys.argv[4]
signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))  # ends a program that hangs
signal.alarm(int(sys.argv[5]))
stacks = open(found + ".stacks", "w")
os.dup2(stacks.fileno(), 100)  # a number that is closed by nobody
faulthandler.dump_traceback_later(int(sys.argv[5]) - 20, file=100)
ends = threading.Event()
if interpreter:  # of a trainer with threads no worker is forked
    threading.Thread(target=ends.wait).start()

def close():
    for each in closed:
        os.close(int(each))

def work(x):
    os.write(1, b"printed")  # the worker has all three
    os.write(2, b"printed")
    assert not os.read(0, 1)
    return x + 1

def of():
    graph = pg.Graph("g")
    node = graph.add(ops.FromSequence(range(12))).then(work, backend="process", workers=2)
    node.then(ops.Batch(4, collate=list))
    return graph.loader(epochs=2)

if when == "before":
    close()
sums = []
for _ in range(2):
    with of() as loader:
        sums.append(sum(map(sum, loader)))
        if when == "between":
            close()
            closed = ""
        sums.append(sum(map(sum, loader)))
with open(found, "w") as file:
    file.write(str(sums))
ends.set()
"""

HANGS_S = 240
"""Less than what `programs` waits; 20 s before it, a program that hangs writes all its stacks."""

CLOSED = ["".join(each) for count in (1, 2, 3) for each in combinations("012", count)]


@pytest.mark.parametrize("closed", CLOSED)
def test_processes_work_and_end_without_standard_descriptors(closed, programs, tmp_path):
    check(programs, tmp_path, closed, False, "before")


def check(programs, folder, *arguments):
    done = programs.run(PROGRAM, *arguments, folder / "found", HANGS_S, start_new_session=True)
    assert done.returncode == 0, (done.stderr, (folder / "found.stacks").read_text())
    assert (folder / "found").read_text() == "[78, 78, 78, 78]"
    assert not done.stderr.replace("printed", "")
