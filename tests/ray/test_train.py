"""Inside Ray Train: ranks found by themselves, states in checkpoints, another number of workers."""

import json
from pathlib import Path

import pytest

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.errors import GraphError
from pipegraph.testing import assert_resumes_exactly


@pytest.fixture(scope="module")
def rows(cluster):
    """A materialised data set of 60 rows in several blocks."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    items = [{"id": i, "text": f"row {i}", "values": [i, i + 0.5]} for i in range(60)]
    return ray.data.from_items(items, override_num_blocks=4).materialize()


def test_rows_of_a_data_set_come_in_their_order_and_in_any_other(rows):
    def ids(**options):
        graph = pg.Graph("rows", seed=1)
        graph.add(ops.FromRayData(rows, **options)).then(ops.Batch(7))
        with graph.loader() as loader:
            batches = list(loader)
        assert [text for batch in batches for text in batch["text"]] == [
            f"row {i}" for batch in batches for i in batch["id"].tolist()
        ]
        return [i for batch in batches for i in batch["id"].tolist()]

    assert ids() == list(range(60))
    shuffled = ids(shuffle=True)
    assert shuffled != list(range(60))
    assert sorted(shuffled) == list(range(60))


def test_rows_of_a_data_set_resume_exactly(rows):
    def make():
        graph = pg.Graph("rows", seed=1)
        graph.add(ops.FromRayData(rows, shuffle=True)).then(ops.Batch(9))
        return graph

    assert_resumes_exactly(make)


def test_ranks_share_the_rows(rows):
    found = []
    for rank in range(3):
        graph = pg.Graph("rows", seed=1)
        graph.add(ops.FromRayData(rows, shuffle=True))
        with graph.loader(rank=rank, world_size=3) as loader:
            found += [row["id"] for row in loader]
    assert sorted(found) == list(range(60))


def test_a_data_set_that_is_not_materialised_is_refused(cluster):
    import ray.data

    with pytest.raises(
        GraphError, match=r"FromRayData: this data set is not materialised: give it dataset.materialize"
    ):
        ops.FromRayData(ray.data.range(3))


def train(data, folder, workers, stop_after):
    """Run a ``TorchTrainer``, from the last checkpoint of its name; each worker writes down what it gets."""
    import ray.train
    from ray.train.torch import TorchTrainer

    def loop(config):
        import tempfile

        def double(batch):
            return {"id": batch["id"], "double": 2 * batch["id"]}

        graph = pg.Graph("train", seed=5)
        source = graph.add(ops.FromRayData(config["data"], shuffle=True))
        source.then(ops.Batch(5)).then(ops.Map(double), name="double", backend="ray")
        context, got = ray.train.get_context(), []
        with graph.loader() as loader:
            if (saved := ray.train.get_checkpoint()) is not None:
                with saved.as_directory() as place:
                    loader.load_state_dict(json.loads((Path(place) / "state.json").read_text()))
            for step, batch in enumerate(loader, 1):
                assert (batch["double"] == 2 * batch["id"]).all()
                got += batch["id"].tolist()
                if step == config["stop_after"]:
                    break
            state = loader.state_dict()
        name = f"{context.get_world_size()}-{context.get_world_rank()}.json"
        (Path(config["folder"]) / name).write_text(json.dumps(got))
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "state.json").write_text(json.dumps(state))
            first = context.get_world_rank() == 0
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(place) if first else None)

    trainer = TorchTrainer(
        loop,
        train_loop_config={"data": data, "folder": str(folder), "stop_after": stop_after},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=False),
        run_config=ray.train.RunConfig(name="run", storage_path=str(folder / "storage")),
    )
    trainer.fit()


def test_a_trainer_with_two_workers_continues_with_three(rows, tmp_path):
    train(rows, tmp_path, 2, stop_after=3)
    train(rows, tmp_path, 3, stop_after=None)
    got = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {name: len(ids) for name, ids in got.items()} == {
        "2-0": 15,
        "2-1": 15,
        "3-0": 10,
        "3-1": 10,
        "3-2": 10,
    }
    assert sorted(i for ids in got.values() for i in ids) == list(range(60))
