"""FSDP2 with torch.distributed.checkpoint: the loader's state beside model and optimizer, on any number of ranks.

torchrun --nproc-per-node=2 with_fsdp.py FOLDER --stop-after 3
torchrun --nproc-per-node=2 with_fsdp.py FOLDER --resume
torchrun --nproc-per-node=1 with_fsdp.py FOLDER --resume    # at another size

Beside a script with torch's DataLoader: a graph in place of the loader and its sampler, and its state among the others.
The state of an elastic graph is the same on all ranks.
"""

import argparse
import json

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numbers_data import Numbers, record
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import pipegraph as pg
from pipegraph import operators as ops


class Training(dcp.stateful.Stateful):
    """What a checkpoint holds."""

    def __init__(self, model, optimizer, loader):
        self.parts = model, optimizer, loader

    def state_dict(self):
        model, optimizer = get_state_dict(*self.parts[:2])
        return {"model": model, "optimizer": optimizer, "loader": json.dumps(self.parts[2].state_dict())}

    def load_state_dict(self, state):
        set_state_dict(*self.parts[:2], model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.parts[2].load_state_dict(json.loads(state["loader"]))


def main(folder, stop_after, resume):
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    graph = pg.Graph("numbers", seed=7)
    graph.add(ops.FromSequence(Numbers(), shuffle=True)).then(ops.Batch(global_size=8))
    with graph.loader() as loader:
        training = {"training": Training(model, optimizer, loader)}
        if resume:
            dcp.load(training, checkpoint_id=f"{folder}/checkpoint")
        for step, batch in enumerate(loader, 1):
            record(folder, dist.get_rank(), batch["row"])
            torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == stop_after:
                dcp.save(training, checkpoint_id=f"{folder}/checkpoint")
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--stop-after", type=int, default=0, help="steps")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    main(given.folder, given.stop_after, given.resume)
