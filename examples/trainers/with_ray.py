"""Ray Train: a stage of actors in a TorchTrainer, stopped in the middle of an epoch, and resumed by
another number of workers.

python with_ray.py FOLDER --trainers 2 --stop-after 5
python with_ray.py FOLDER --trainers 3

On a cluster give it a FOLDER that all nodes see, and RAY_ADDRESS=auto; else it runs on this machine alone.
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")  # the default from Ray 2.51 on

import ray
import ray.train.torch
import torch
from numbers_data import ROWS, Numbers, record

import pipegraph as pg
from pipegraph import operators as ops


def decode(number):
    return Numbers()[number]


def train(config):
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(7)
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = pg.Graph("numbers", seed=7)
    rows = graph.add(ops.FromSequence(range(ROWS), shuffle=True))
    rows.then(decode, workers=2, backend="ray").then(ops.Batch(4))
    parts = {"model": model, "optimizer": optimizer}
    with graph.loader() as loader:
        parts["loader"] = loader
        if (checkpoint := ray.train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as place:
                saved = torch.load(Path(place, "state.pt"))
            for name, part in parts.items():
                part.load_state_dict(saved[name])
        for step, batch in enumerate(loader, 1):
            record(config["folder"], rank, batch["row"])
            torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == config["stop_after"]:
                report(parts, rank)
                break


def report(parts, rank):
    """All ranks call it. The state of one is enough: which rows are left is known to each."""
    if rank:
        ray.train.report({})
        return
    with tempfile.TemporaryDirectory() as place:
        torch.save({name: part.state_dict() for name, part in parts.items()}, Path(place, "state.pt"))
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(place))


def main(folder, trainers, stop_after):
    # A CPU for each trainer and each of its actors.
    ray.init(num_cpus=None if "RAY_ADDRESS" in os.environ else 3 * trainers, include_dashboard=False)
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": folder, "stop_after": stop_after},
        scaling_config=ray.train.ScalingConfig(num_workers=trainers),
        # A run of the same name continues from its last checkpoint.
        run_config=ray.train.RunConfig(name="numbers", storage_path=f"{folder}/runs"),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=os.path.abspath)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--stop-after", type=int, default=0, help="steps")
    given = parser.parse_args()
    main(given.folder, given.trainers, given.stop_after)
