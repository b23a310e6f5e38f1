"""A trainer with threads has one process that starts its workers, for all its loaders, which see the trainer as it is now."""

import os

BEGIN = """
import os, sys, threading
import pipegraph as pg
from pipegraph import operators as ops

gate = threading.Event()
threading.Thread(target=gate.wait, daemon=True).start()  # as a logger has one

def delivered(function, **options):
    graph = pg.Graph("g")
    graph.add(ops.FromSequence(range(2))).then(function, backend="process")
    with graph.loader(**options) as loader:
        return list(loader)

class Parents(list):
    def __getitem__(self, index):
        return os.getppid()

def data_loader():
    return [int(each) for each in pg.DataLoader(Parents([0, 0]), num_workers=1)]
"""


def test_loaders_one_after_the_other_share_it_and_it_ends_with_the_trainer(programs):
    done = programs.run(
        BEGIN
        + """
found = {*delivered(lambda x: os.getppid()), *data_loader()}
gate.set()  # the last thread has ended, and the trainer goes on with the same
while threading.active_count() > 1:
    threading.enumerate()[-1].join()
print(*found | {*data_loader()} | {*delivered(lambda x: os.getppid())})
"""
    )
    assert len(done.stdout.split()) == 1, done
    assert done.stderr == ""
    assert not os.path.exists(f"/proc/{done.stdout.strip()}")


def test_workers_see_what_the_trainer_has_changed_in_the_meantime(programs, tmp_path):
    (tmp_path / "module_of_a_new_folder.py").write_text("value = 1\n")
    done = programs.run(
        BEGIN
        + """
delivered(abs)
os.environ["A_NEW_ONE"] = "said"
del os.environ["AN_OLD_ONE"]
os.chdir(sys.argv[1])
sys.path.append(sys.argv[1])

def surroundings(x):
    import module_of_a_new_folder
    return module_of_a_new_folder.value, os.environ.get("A_NEW_ONE"), os.environ.get("AN_OLD_ONE"), os.getcwd()

print(delivered(surroundings)[0])
file = os.open("written", os.O_CREAT | os.O_WRONLY)
os.dup2(file, 1)
delivered(lambda x: print("by a worker"))
""",
        tmp_path,
        env={"AN_OLD_ONE": "unsaid"},
    )
    assert done.stdout == f"{(1, 'said', None, str(tmp_path))}\n", done.stderr
    assert (tmp_path / "written").read_text() == "by a worker\n" * 2
