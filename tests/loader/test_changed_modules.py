"""Workers see what a script changes in its modules between two passes, as torch's do; else a warning says that they do not."""

import pytest

DATA = """
import multiprocessing, os
import torch

SIZE = 1

def helper(x):
    return x * SIZE

class Data(torch.utils.data.Dataset):
    mosaic = True
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return helper(1), self.mosaic, float(torch.zeros(1).dtype == torch.float64)

class Names(Data):
    def __getitem__(self, index):
        parent = multiprocessing.parent_process()
        number = int(multiprocessing.current_process().name.removeprefix("Process-"))
        return number, parent.pid == os.getppid() and parent.is_alive()

class Parents(Data):
    def __getitem__(self, index):
        return os.getppid()
"""
BEGIN = """
import sys, threading, warnings
sys.path.append(sys.argv[1])
import torch
import pipegraph as pg
import mydata

warnings.simplefilter("always")

def seen(loader):
    return [[column.tolist() for column in batch] for batch in loader]
"""
THREAD = """
gate = threading.Event()
threading.Thread(target=gate.wait, daemon=True).start()
"""
CHANGES = ["mydata.SIZE = 2", "mydata.Data.mosaic = False", "torch.set_default_dtype(torch.float64)"]
ALL = [[2, 2], [False, False], [1.0, 1.0]]


@pytest.fixture
def run(programs, tmp_path):
    (tmp_path / "mydata.py").write_text(DATA)
    return lambda program: programs.run(BEGIN + program, tmp_path)


def test_a_later_pass_sees_what_has_changed(run):
    """Each change by itself; then all of them are taken back."""
    done = run(
        f"""
loader = pg.DataLoader(mydata.Data(), 2, num_workers=1)
before = seen(loader)
for change in {CHANGES}:
    exec(change)
    print(seen(loader))
mydata.SIZE, mydata.Data.mosaic = 1, True
torch.set_default_dtype(torch.float32)
assert seen(loader) == before
"""
    )
    expected = [[[2, 2], [True] * 2, [0.0] * 2], [[2, 2], [False] * 2, [0.0] * 2], ALL]
    assert (done.stdout.splitlines(), done.stderr) == ([str([each]) for each in expected], "")


def test_the_first_pass_sees_what_has_changed_since_another_loaders(run):
    done = run(
        """
first, second = (pg.DataLoader(mydata.Data(), 2, num_workers=1) for _ in range(2))
seen(first)
mydata.SIZE = 2
print(seen(second)[0][0])
mydata.SIZE = 1
print(seen(first)[0][0], seen(second)[0][0])
"""
    )
    assert (done.stdout, done.stderr) == ("[2, 2]\n[1, 1] [1, 1]\n", "")


def test_nothing_is_forked_anew_where_nothing_has_changed(run):
    done = run(
        """
loader = pg.DataLoader(mydata.Parents(), 2, num_workers=1)
print(len({int(parent) for _ in range(3) for batch in loader for parent in batch}))
"""
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_trainer_with_a_thread_is_told_once_that_its_workers_do_not_see_a_change(run):
    done = run(
        THREAD
        + """
loader = pg.DataLoader(mydata.Data(), 2, num_workers=1)
with warnings.catch_warnings(record=True) as caught:
    before = [seen(loader), seen(loader)]
    assert before[0] == before[1] and not caught
    for size in (2, 3):
        mydata.SIZE = size
        assert seen(loader) == before[0]
    (one,) = caught
print(one.category.__name__, one.message)
gate.set()
while threading.active_count() > 1:
    threading.enumerate()[-1].join()
print(seen(loader)[0][0])  # it may be forked again
"""
    )
    told, now = done.stdout.splitlines()
    assert told.startswith("PipegraphWarning DataLoader: what Data, the collate_fn or"), done.stderr
    assert "use workers='thread'" in told
    assert now == "[3, 3]"


@pytest.mark.parametrize("begin", ["", THREAD], ids=["forked", "fresh interpreter"])
def test_a_worker_is_known_to_multiprocessing(run, begin):
    done = run(
        begin
        + """
loader = pg.DataLoader(mydata.Names(), 1, num_workers=2)
(one, first), (two, second) = seen(loader)
print(one != two, first, second)
"""
    )
    assert (done.stdout, done.stderr) == ("True [True] [True]\n", "")
