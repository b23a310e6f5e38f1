"""Hugging Face's Trainer: stopped in the middle of an epoch, resumed from its own checkpoint, every row once.

python with_transformers.py FOLDER --stop-after 3
python with_transformers.py FOLDER --resume

Beside a script without pipegraph: one line. The Trainer has its loaders built by Accelerate.
"""

import argparse

import accelerate.data_loader
import torch
import transformers
from numbers_data import Numbers, record

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


def main(folder, stop_after, resume, workers):
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
    )
    trainer = transformers.Trainer(
        Model(folder),
        arguments,
        train_dataset=Numbers(),
        callbacks=[StopAfter(stop_after)] if stop_after else None,
    )
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
    given = parser.parse_args()
    main(given.folder, given.stop_after, given.resume, given.workers)
