"""A source of your own: the rows of an SQLite table, read by several workers in a shuffled order.

Its states resume at another number of ranks too, because ``begin_run`` keeps what other ranks have had.

python examples/custom_source.py --smoke
"""

import argparse
import sqlite3
import tempfile

import numpy as np

import pipegraph as pg
from pipegraph import operators as ops


class Rows(pg.Source):
    """The rows 1..n of a table as dicts, permuted anew in each epoch, dealt out to the ranks.

    Args:
        path: a database with a table ``samples(id, text, label)``, ids from 1.
    """

    random_access = True
    order = pg.order.StridedOrder()

    def __init__(self, path, seed=0):
        self.path, self.seed = path, seed
        self.had = (0, ())
        with sqlite3.connect(path) as db:
            (self.count,) = db.execute("select count(*) from samples").fetchone()
        db.close()

    def config(self):  # what changes the order or the content; the path does not
        return {"count": self.count, "seed": self.seed}

    def open(self, context):  # in each worker: its own connection
        self.db = sqlite3.connect(self.path, check_same_thread=False)

    def close(self):
        self.db.close()

    def begin_run(self, epoch, history):  # after a resume at another number of ranks
        self.had = (epoch, history)

    def history(self, epoch):
        return self.had[1] if epoch == self.had[0] else ()

    def length(self, epoch, rank, world_size):
        return self.order.length(self.count, world_size, self.history(epoch))

    def positions(self, epoch, rank, world_size, start):
        history = self.history(epoch)
        found = self.order.positions(self.count, self.seed, epoch, rank, world_size, start, history=history)
        return iter(found.tolist())

    def index_of(self, position, epoch):  # the row itself, whatever the order: ops.Cache knows samples by it
        return int(self.order.samples_at(self.count, np.array([position]), self.seed, epoch)[0])

    def read(self, position, epoch):
        query = "select id, text, label from samples where id = ?"
        key, text, label = self.db.execute(query, (self.index_of(position, epoch) + 1,)).fetchone()
        return {"key": str(key), "text": text, "label": label}


def pipeline(path):
    graph = pg.Graph("rows", seed=7)
    rows = graph.add(Rows(path, seed=7), name="rows", workers=4).then(ops.Cache("100 MB"))
    rows.then(ops.Batch(16), name="batch")
    return graph


def main(path):
    with pipeline(path).loader(epochs=2) as loader:
        for epoch in range(2):
            keys = [
                key for batch in loader for key in batch["key"]
            ]  # from the second epoch on out of the cache
            print(f"epoch {epoch}: {len(keys)} rows, first {keys[:4]}")
            assert len(set(keys)) == len(keys)
        print(loader.profile())

    keys = []
    for rank in range(2):  # two ranks take two batches each, and one goes on alone
        with pipeline(path).loader(rank=rank, world_size=2) as loader:
            passing = iter(loader)
            keys += [key for _ in range(2) for key in next(passing)["key"]]
            state = loader.state_dict()
    with pipeline(path).loader(rank=0, world_size=1) as loader:
        loader.load_state_dict(state)
        keys += [key for batch in loader for key in batch["key"]]
    print(f"stopped on two ranks, resumed on one: {len(keys)} rows, {len(set(keys))} different ones")
    assert len(keys) == len(set(keys))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--database", default="samples.db")
    parser.add_argument("--smoke", action="store_true", help="on a table of 200 rows that is made for it")
    arguments = parser.parse_args()
    if arguments.smoke:
        with tempfile.TemporaryDirectory() as folder:
            made = sqlite3.connect(f"{folder}/samples.db")
            made.execute("create table samples (id integer primary key, text, label)")
            rows = ((f"document {i}", i % 3) for i in range(200))
            made.executemany("insert into samples (text, label) values (?, ?)", rows)
            made.commit()
            made.close()
            main(f"{folder}/samples.db")
    else:
        main(arguments.database)
