"""Accelerate: ``prepare``, ``skip_first_batches`` and ``gather_for_metrics``, on one process or several.

python with_accelerate.py FOLDER --stop-after 3
python with_accelerate.py FOLDER --resume
torchrun --nproc-per-node=2 with_accelerate.py FOLDER --stop-after 2

Beside a script with torch's DataLoader: one line. ``prepare`` and ``skip_first_batches`` build a loader of their own
for each rank from the one they are given, of the class that their module names ``DataLoader``.
"""

import argparse

import accelerate
import accelerate.data_loader
import torch
from numbers_data import ROWS, Numbers, record

import pipegraph as pg

accelerate.data_loader.DataLoader = pg.DataLoader


def main(folder, stop_after, resume, workers):
    accelerate.utils.set_seed(7)
    seedable = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=seedable)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = pg.DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert isinstance(loader.base_dataloader, pg.DataLoader)
    done = 0
    if resume:
        accelerator.load_state(f"{folder}/checkpoint")
        done = int(torch.load(f"{folder}/steps.pt"))
    for batch in accelerate.skip_first_batches(loader, done) if done else loader:
        record(folder, accelerator.process_index, batch["row"])
        accelerator.backward(torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]))
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == stop_after:
            accelerator.save_state(f"{folder}/checkpoint")
            if accelerator.is_main_process:
                torch.save(torch.tensor(done), f"{folder}/steps.pt")
            break
    else:
        evaluate(accelerator, model, workers)
    accelerator.end_training()


def evaluate(accelerator, model, workers):
    """Every row once, on any number of ranks, also where they do not divide the rows."""
    rows = torch.utils.data.Subset(Numbers(), range(ROWS - 3))
    loader = accelerator.prepare(pg.DataLoader(rows, batch_size=4, num_workers=workers))
    seen = []
    with torch.no_grad():
        for batch in loader:
            _, found = accelerator.gather_for_metrics((model(batch["x"]), batch["row"]))
            seen += found.tolist()
    assert sorted(seen) == list(range(ROWS - 3)), seen
    accelerator.print(f"evaluated {len(seen)} rows, each once")


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
