"""Lightning: whatever its checkpoint was saved at, a resumed run is trained on what the uninterrupted run was.

Each case runs a whole training that saves several checkpoints, resumes each of them in a new ``Trainer``, and compares
the rows of every step, with their epoch and their number in it. ``make test-interop`` brings Lightning.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

import pipegraph as pg
from pipegraph import operators as ops

if importlib.util.find_spec("lightning") is None:
    pytest.skip("needs lightning: make test-interop brings it", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.callbacks import Callback

EPOCHS, ROWS = 3, 40

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


# -- loaders -----------------------------------------------------------------------------------


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        return iter(range(ROWS) if worker is None else range(worker.id, ROWS, worker.num_workers))


class Kept(torch.utils.data.IterableDataset):
    """With a state of its own."""

    at = loaded = 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.loaded = self.loaded, 0
        while self.at < ROWS:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["at"]


class WithoutLength:
    """A batch sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(RandomSampler(range(ROWS)), 4, False))


def mapped(**options: Any) -> Any:
    return pg.DataLoader(range(ROWS), 4, shuffle=True, **options)


def graph(*stages: Any, source: Any = None, epochs: int = EPOCHS, **options: Any) -> Any:
    found = pg.Graph("numbers", seed=3)
    node = found.add(source or ops.FromSequence(range(ROWS), shuffle=True))
    for stage in (*stages, ops.Batch(4)):
        node = node.then(stage)
    return found.loader(epochs=epochs, **options)


def drawn_by_a_sampler() -> Any:
    sampler = RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(5))
    return graph(source=ops.FromSequence(range(ROWS), sampler=sampler), epochs=1)


def kept(row: int) -> bool:
    return True


def threads(**options: Any) -> Any:
    return pg.DataLoader(range(ROWS), num_workers=2, workers="thread", **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "map-style": mapped,
    "workers": lambda: mapped(num_workers=2, persistent_workers=True),
    "threads": lambda: threads(batch_size=4, shuffle=True),
    "generator": lambda: mapped(generator=torch.Generator().manual_seed(4)),
    "batch sampler without length": lambda: threads(batch_sampler=WithoutLength()),
    "iterable": lambda: pg.DataLoader(Numbers(), 4),
    "iterable with a state": lambda: pg.DataLoader(Kept(), 4),
    "iterable in workers": lambda: pg.DataLoader(Numbers(), 4, num_workers=2),
    "graph": graph,
    "graph with a sampler": drawn_by_a_sampler,
    "graph without length": lambda: graph(ops.Filter(kept)),
    "graph of an iterable": lambda: graph(ops.Shuffle(8), source=ops.FromIterable(list(range(ROWS)))),
    "two": lambda: {"a": mapped(), "b": pg.DataLoader(range(100, 112), 4, shuffle=True)},
    "two without length": lambda: {"a": pg.DataLoader(Numbers(), 4), "b": pg.DataLoader(range(100, 112), 4)},
}

SAVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "steps": ({"every_n_train_steps": 4}, {}),
    "the last batch": ({"every_n_train_steps": 10}, {}),
    "epoch ends": ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, {}),
    "limits": ({"every_n_train_steps": 3}, {"limit_train_batches": 6}),
    "steps with validation": ({"every_n_train_steps": 5}, {"val_check_interval": 5, "limit_val_batches": 2}),
    "after validation": (
        {"every_n_epochs": 1, "save_on_train_epoch_end": False},
        {"val_check_interval": 5, "limit_val_batches": 2},
    ),
    "validation by steps": (
        {"every_n_train_steps": 4},
        {"val_check_interval": 7, "check_val_every_n_epoch": None, "limit_val_batches": 2},
    ),
    "accumulation": ({"every_n_train_steps": 2}, {"accumulate_grad_batches": 3}),
    "steps, not epochs": ({"every_n_train_steps": 5}, {"max_steps": 27}),
    "reloading": ({"every_n_train_steps": 5}, {"reload_dataloaders_every_n_epochs": 1}),
}


# -- training ----------------------------------------------------------------------------------


class Recording:
    """A model's methods; mixed into the module class of either package."""

    def __init__(self, make: Callable[[], Any], schedule: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.make, self.schedule = make, schedule
        self.steps: list[Any] = []

    def train_dataloader(self) -> Any:
        return self.make()

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(range(8), 2)

    def training_step(self, batch: Any, number: int) -> Any:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.steps.append((self.current_epoch, number, [part.tolist() for part in parts]))  # type: ignore[attr-defined]
        noise = torch.rand(()) * 0  # from the generator that orders are drawn from, too
        return self.layer(parts[0].float()[:, None]).mean() + noise

    def validation_step(self, batch: Any, number: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)  # type: ignore[attr-defined]
        if not self.schedule:
            return optimizer
        steps = self.trainer.estimated_stepping_batches  # type: ignore[attr-defined]
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=int(steps))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Model(Recording, lightning.LightningModule):  # type: ignore[misc]
    pass


def fit(
    make: Callable[[], Any],
    folder: Path,
    checkpoint: Path | None = None,
    save: dict[str, Any] | None = None,
    callbacks: tuple[Any, ...] = (),
    package: Any = lightning,
    model: Any = None,
    **options: Any,
) -> list[Any]:
    package.seed_everything(7, verbose=False)
    kind = (package.pytorch if package is lightning else package).callbacks.ModelCheckpoint
    saving = [kind(folder, "{step:03d}", save_top_k=-1, **save)] if save else []
    trainer = package.Trainer(
        **{"max_epochs": EPOCHS, "limit_val_batches": 0, **options},
        accelerator="cpu",
        logger=False,
        callbacks=[*callbacks, *saving],
        enable_checkpointing=bool(saving),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = model or Model(make)
    trainer.fit(model, ckpt_path=checkpoint)
    return model.steps


def checkpoints(folder: Path) -> list[tuple[Path, int]]:
    """Each with the number of batches that were trained on."""
    return [
        (path, torch.load(path)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"])
        for path in sorted(folder.glob("*.ckpt"))
    ]


def complete(steps: list[Any], cut: bool) -> bool:
    """Whether each epoch's rows came once, of the first loader."""
    for epoch in {each[0] for each in steps}:
        rows = sorted(row for number, _, parts in steps if number == epoch for row in parts[0])
        if len(set(rows)) != len(rows) or not (cut or rows == list(range(ROWS))):
            return False
    return True


# A sampler that is made anew in each epoch is drawn from a number of times that depends on Lightning's own checks.
CASES = [
    (loader, save)
    for loader in LOADERS
    for save in SAVES
    if (loader, save) != ("graph with a sampler", "reloading")
]


@pytest.mark.parametrize(("loader", "save"), CASES)
def test_a_resumed_run_is_trained_on_what_the_uninterrupted_one_was(
    loader: str, save: str, tmp_path: Path
) -> None:
    when, options = SAVES[save]
    make = LOADERS[loader]
    whole = fit(make, tmp_path, save=when, **options)
    assert complete(whole, cut="limit_train_batches" in options or "max_steps" in options)
    assert len({str(step) for step in whole}) == len(whole)
    found = checkpoints(tmp_path)
    assert len(found) >= EPOCHS
    wrong = {
        path.name: number for path, number in found if fit(make, tmp_path, path, **options) != whole[number:]
    }
    assert not wrong


class SaveIn(Callback):  # type: ignore[misc]
    """Save in a hook, the first time that ``when`` holds there; ``fails``: the training, right after."""

    def __init__(self, path: Path, hook: str, when: Callable[[Any], bool], fails: bool = False) -> None:
        self.path, self.when, self.fails = path, when, fails
        setattr(self, hook, self.save)

    def save(self, trainer: Any, *rest: Any) -> None:
        if not self.path.exists() and self.when(trainer):
            if self.fails:
                raise MemoryError
            trainer.save_checkpoint(self.path)

    def on_exception(self, trainer: Any, *rest: Any) -> None:
        trainer.save_checkpoint(self.path)


def batches(trainer: Any) -> int:
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


SOME = ["map-style", "graph", "graph without length", "iterable"]


@pytest.mark.parametrize(
    ("hook", "number"),
    [
        *[("on_train_batch_start", number) for number in (1, 5, 10, 11)],
        ("on_train_start", 1),
        *[("on_train_epoch_start", number) for number in (1, 11, 21)],
    ],
)
@pytest.mark.parametrize("loader", SOME)
def test_a_checkpoint_of_a_moment_before_a_batch_is_trained_on_repeats_that_batch(
    loader: str, hook: str, number: int, tmp_path: Path
) -> None:
    make = LOADERS[loader]
    counted = number if hook == "on_train_batch_start" else number - 1
    saving = SaveIn(tmp_path / "a.ckpt", hook, lambda trainer: batches(trainer) == counted)
    whole = fit(make, tmp_path, callbacks=(saving,))
    assert fit(make, tmp_path, saving.path) == whole[number - 1 :]


class Shared(Numbers):
    """Dealt to the ranks."""

    def __iter__(self) -> Iterator[int]:
        rank = int(os.environ["RANK"])
        return iter(range(20 * rank, 20 * rank + 20))


RANKED: dict[str, Callable[[], Any]] = {
    "map-style": mapped,
    "graph": graph,
    "graph without length": lambda: graph(ops.Filter(kept), equal_steps=True),
    "iterable": lambda: pg.DataLoader(Shared(), 4),
}
RESUMED = 2, 5
"""Batches of 5 in each epoch of a rank."""


def test_two_ranks_resume_as_one_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*command, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    assert len(ranks) == 2
    for loader in RANKED:
        assert complete([step for rank in ranks for step in rank[loader][0]], cut=False), loader
        for whole, *rests in (rank[loader] for rank in ranks):
            assert rests == [whole[number:] for number in RESUMED], loader


def train_as_a_rank(folder: Path) -> None:
    """All loaders: the whole training, and what follows each of the checkpoints."""
    found: dict[str, list[Any]] = {}
    two: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    for loader, make in RANKED.items():
        own = folder / loader
        found[loader] = [fit(make, own, save={"every_n_train_steps": 1}, **two)]
        found[loader] += [fit(make, own, own / f"step={number:03d}.ckpt", **two) for number in RESUMED]
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    train_as_a_rank(Path(sys.argv[1]))
