"""Hugging Face's Trainer: stopped in the middle of an epoch, resumed from its own checkpoint, every row once.

python with_transformers.py FOLDER --stop-after 3
python with_transformers.py FOLDER --resume
python with_transformers.py FOLDER --stream --stop-after 3    # an IterableDataset, with the loader's own state

Beside a script without pipegraph: one line. The Trainer has its loaders built by Accelerate.
"""

import argparse

import accelerate.data_loader
import torch
import transformers
from numbers_data import ROWS, Numbers, record

import pipegraph as pg

accelerate.data_loader.DataLoader = pg.DataLoader


class Model(torch.nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, y, row):
        record(self.folder, 0, row)
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), y)}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        rows = range(ROWS) if worker is None else range(worker.id, ROWS, worker.num_workers)
        return map(Numbers().__getitem__, rows)


class Streaming(pg.TrainOnLoader, transformers.Trainer):
    """Trains on a loader as it is, and keeps its state in each checkpoint."""


def main(folder, stop_after, resume, workers, stream):
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        dataloader_num_workers=workers,
        save_steps=stop_after or 10_000,
        seed=7,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_steps=ROWS // 8 if stream else -1,
    )
    callbacks = [StopAfter(stop_after)] if stop_after else None
    if stream:
        loader = pg.DataLoader(Stream(), batch_size=8, num_workers=workers)
        trainer = Streaming(Model(folder), arguments, callbacks=callbacks, loader=loader)
    else:
        trainer = transformers.Trainer(Model(folder), arguments, train_dataset=Numbers(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)


class StopAfter(transformers.TrainerCallback):
    """Stands in for a machine that is taken away."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, arguments, state, control, **_):
        control.should_training_stop = state.global_step == self.steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--stop-after", type=int, default=0, help="steps")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stream", action="store_true")
    given = parser.parse_args()
    main(given.folder, given.stop_after, given.resume, given.workers, given.stream)
