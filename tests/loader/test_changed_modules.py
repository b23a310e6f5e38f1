"""Workers see what a script changes in its modules between two passes, as torch's do."""

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
