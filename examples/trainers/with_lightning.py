"""Lightning: stopped in the middle of an epoch, resumed from its own checkpoint, every row once.

python with_lightning.py FOLDER --stop-after 3    # writes FOLDER/last.ckpt
python with_lightning.py FOLDER --resume

Beside a script with torch's DataLoader: the import. A callback that pip registers with Lightning keeps the loader's
state.
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from numbers_data import Numbers, record

import pipegraph as pg


class Model(lightning.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        record(self.folder, self.global_rank, batch["row"])
        return torch.nn.functional.mse_loss(self.layer(batch["x"]), batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(folder, stop_after, resume, workers):
    lightning.seed_everything(7)
    loader = pg.DataLoader(Numbers(), batch_size=8, shuffle=True, num_workers=workers)
    trainer = lightning.Trainer(
        max_epochs=1,
        max_steps=stop_after or -1,
        accelerator="cpu",
        logger=False,
        callbacks=[ModelCheckpoint(folder, "last", every_n_train_steps=3, save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(folder), loader, ckpt_path=f"{folder}/last.ckpt" if resume else None)


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
