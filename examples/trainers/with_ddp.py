"""Plain DDP: a DataLoader script with its DistributedSampler, stopped in the middle of an epoch and resumed.

torchrun --nproc-per-node=2 with_ddp.py FOLDER --stop-after 3
torchrun --nproc-per-node=2 with_ddp.py FOLDER --resume

Beside a script with torch's DataLoader: the import, and one line each to save and to load the loader's state.
"""

import argparse

import torch
import torch.distributed as dist
from numbers_data import ROWS, Numbers, record

import pipegraph as pg
from pipegraph import operators as ops


def main(folder, stop_after, resume, workers):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = torch.utils.data.DistributedSampler(Numbers(), seed=7)
    loader = pg.DataLoader(Numbers(), batch_size=4, sampler=sampler, num_workers=workers)
    if resume:
        saved = torch.load(f"{folder}/rank{rank}.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    for step, batch in enumerate(loader, 1):
        record(folder, rank, batch["row"])
        torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == stop_after:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),
            }
            torch.save(state, f"{folder}/rank{rank}.pt")
            break
    else:
        evaluate(model.module, rank)
    dist.destroy_process_group()


def evaluate(model, rank):
    """Every row once, also where the ranks do not divide them: the places that fill up a rank's share are left out."""
    rows = torch.utils.data.Subset(Numbers(), range(ROWS - 3))
    graph = pg.Graph("evaluate")
    graph.add(ops.FromSequence(rows)).then(ops.Batch(4))
    counted = torch.zeros(ROWS, dtype=torch.int64)
    with graph.loader() as loader, torch.no_grad():
        for chunk in loader.chunks():
            real = torch.as_tensor(chunk.positions) < len(rows)
            model(chunk.data["x"])
            counted[chunk.data["row"][real]] += 1
    dist.all_reduce(counted)
    assert counted.tolist() == [1] * (ROWS - 3) + [0] * 3, counted
    if rank == 0:
        print(f"evaluated {int(counted.sum())} rows, each once")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--stop-after", type=int, default=0, help="steps")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    main(given.folder, given.stop_after, given.resume, given.workers)
