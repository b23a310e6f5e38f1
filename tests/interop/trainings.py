"""Trainings of one process or one rank, each whole and resumed from all of its checkpoints: what ``test_table`` runs.

python trainings.py FOLDER TRAINER, also under torchrun; writes FOLDER/rank0.json.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import pipegraph as pg
from pipegraph import operators as ops

ROWS, BATCH, EPOCHS = 40, 4, 3
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS = ROWS // BATCH // RANKS
"""Batches of an epoch and a rank."""

CASES: dict[str, dict[str, Any]] = {
    "in the middle": {"saves": (2, STEPS + 3, 2 * STEPS + 1), "workers": 2},
    "last batch": {"saves": (STEPS, 2 * STEPS)},
    "epoch's end": {"ends": True},
    "no length": {"saves": (2, STEPS, STEPS + 3), "ends": True, "length": False},
    "limit": {"saves": (2, STEPS - 1, STEPS + 1), "limit": STEPS - 1},
    "validation": {"saves": (2, 4, STEPS + 2), "validate": 2},
    "accumulation": {"saves": (3, STEPS, STEPS + 3), "accumulate": 3},
}


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": torch.tensor([row / ROWS]), "row": row}


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __init__(self, split: bool = True) -> None:
        self.shared = range(RANK, ROWS, RANKS) if split else range(ROWS)

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        part, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (Rows()[row] for row in self.shared[part::parts])


def kept(row: Any) -> bool:
    return True


def graph(length: bool, workers: int) -> Any:
    found = pg.Graph("rows", seed=3)
    node = found.add(ops.FromSequence(Rows(), shuffle=True))
    for stage in ([] if length else [ops.Filter(kept)]) + [ops.Batch(BATCH)]:
        node = node.then(stage)
    return found.loader(epochs=EPOCHS, equal_steps=None if length else RANKS > 1)


def sampled(length: bool, workers: int, **options: Any) -> Any:
    """A ``pg.DataLoader`` that splits its data among the ranks by itself."""
    if not length:
        return pg.DataLoader(Stream(), BATCH, num_workers=workers, **options)
    if RANKS > 1:
        options["sampler"] = DistributedSampler(Rows(), seed=5)
    else:
        options |= {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
    return pg.DataLoader(Rows(), BATCH, num_workers=workers, **options)


def whole(length: bool, count: int, **options: Any) -> Any:
    """A ``pg.DataLoader`` that Accelerate splits among the ranks."""
    dataset: Any = Rows() if length else Stream(split=False)
    return pg.DataLoader(
        dataset, BATCH, shuffle=True if length else None, num_workers=count if length else 0, **options
    )


def threads(length: bool, workers: int) -> Any:
    return whole(length, 2, workers="thread")


# -- a loop of one's own -----------------------------------------------------------------------


class Plain:
    """Plain torch: a state per rank and checkpoint."""

    def __init__(self, loader: Any) -> None:
        torch.manual_seed(7)
        self.loader = loader
        self.model: Any = torch.nn.Linear(1, 1)
        if RANKS > 1:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def begin(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def is_behind(self, loader: Any) -> bool:
        """Whether its state is of the next epoch, although the loop has not ended."""
        return False

    def backward(self, loss: Any) -> None:
        loss.backward()

    def save(self, path: Path, place: dict[str, int]) -> None:
        state = {"model": self.model.state_dict(), "loader": self.loader.state_dict(), "place": place}
        torch.save(state, f"{path}.rank{RANK}")

    def load(self, path: Path) -> dict[str, int]:
        saved = torch.load(f"{path}.rank{RANK}")
        self.model.load_state_dict(saved["model"])
        self.loader.load_state_dict(saved["loader"])
        return saved["place"]  # type: ignore[no-any-return]


class Sharded(Plain):
    """FSDP2 and ``torch.distributed.checkpoint``."""

    def __init__(self, loader: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(7)
        self.loader = loader
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
        fully_shard(self.model, mesh=dist.device_mesh.init_device_mesh("cpu", (RANKS,)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def _state(self, place: dict[str, int]) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        loader: Any = self.loader
        return {"model": get_model_state_dict(self.model), "loader": loader, "place": place}

    def save(self, path: Path, place: dict[str, int]) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(place), checkpoint_id=path)

    def load(self, path: Path) -> dict[str, int]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        place = dict.fromkeys(("epoch", "batches", "done"), 0)
        state = self._state(place)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(self.model, state["model"])
        return state["place"]  # type: ignore[no-any-return]


class Accelerated(Plain):
    """``prepare``, and the loader registered for ``save_state``; ``skips``: ``skip_first_batches`` instead."""

    skips = False

    def __init__(self, loader: Any) -> None:
        import accelerate
        import accelerate.data_loader

        accelerate.data_loader.DataLoader = pg.DataLoader
        accelerate.utils.set_seed(7)
        accelerate.state.AcceleratorState._reset_state()
        accelerate.state.GradientState._reset_state()
        self.skip = accelerate.skip_first_batches
        self.accelerator = accelerate.Accelerator(
            cpu=True,
            dataloader_config=accelerate.utils.DataLoaderConfiguration(
                use_seedable_sampler=True, dispatch_batches=False
            ),
        )
        model = torch.nn.Linear(1, 1)
        self.loader = loader
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader
        )
        # Accelerate saves on the first rank only. A graph without a length has a state of its own on each rank.
        self.each = isinstance(loader, pg.Loader)
        if not (self.skips or self.each):
            self.accelerator.register_for_checkpointing(self.loader)

    def is_behind(self, loader: Any) -> bool:
        ended = self.accelerator.gradient_state.end_of_dataloader
        return bool(ended) and not (self.skips or isinstance(loader, pg.Loader))

    def backward(self, loss: Any) -> None:
        self.accelerator.backward(loss)

    def save(self, path: Path, place: dict[str, int]) -> None:
        self.accelerator.save_state(str(path))
        states = [self.loader.state_dict()] if self.each else []
        torch.save((place, *states), f"{path}/place{RANK}.pt")

    def load(self, path: Path) -> dict[str, int]:
        self.accelerator.load_state(str(path))
        place, *states = torch.load(f"{path}/place{RANK}.pt")
        for state in states:
            self.loader.load_state_dict(state)
        return place  # type: ignore[no-any-return]


class Skipping(Accelerated):
    skips = True


def loop(
    kind: type[Plain],
    make: Callable[..., Any],
    folder: Path,
    resume: str = "",
    length: bool = True,
    saves: tuple[int, ...] = (),
    ends: bool = False,
    limit: int | None = None,
    validate: int = 0,
    accumulate: int = 1,
    workers: int = 0,
) -> list[Any]:
    """The steps, each as its epoch, its number and its rows."""
    training = kind(make(length, workers))
    place = training.load(folder / resume) if resume else {"epoch": 0, "batches": 0, "done": 0}
    steps: list[Any] = []
    first, number, done = place["epoch"], place["batches"], place["done"]
    for epoch in range(first, EPOCHS):
        training.begin(epoch)
        loader: Any = training.loader
        if isinstance(training, Skipping) and number:
            loader = training.skip(loader, number)
        for batch in loader:
            if number == limit:
                break
            number, done = number + 1, done + 1
            steps.append((epoch, number, batch["row"].tolist()))
            training.backward(training.model(batch["x"]).mean())
            if done % accumulate == 0:
                training.optimizer.step()
                training.optimizer.zero_grad()
            if validate and number % validate == 0:
                assert sum(len(rows["row"]) for rows in pg.DataLoader(Rows(), 8)) == ROWS
                torch.rand(3)
            if done in saves and not resume:
                place = {"epoch": epoch, "batches": number, "done": done}
                if training.is_behind(loader):
                    place |= {"epoch": epoch + 1, "batches": 0}
                training.save(folder / f"step{done}", place)
        number = 0
        if ends and not resume:
            training.save(folder / f"end{epoch}", {"epoch": epoch + 1, "batches": 0, "done": done})
    if isinstance(training.loader, pg.Loader):
        training.loader.close()
    return steps


# -- Hugging Face's Trainer --------------------------------------------------------------------


def trained(
    make: Callable[..., Any] | None,
    folder: Path,
    resume: str = "",
    length: bool = True,
    ends: bool = False,
    limit: int | None = None,
    validate: int = 0,
    accumulate: int = 1,
    workers: int = 0,
    stop: int = -1,
    saves: tuple[int, ...] = (),
) -> list[Any]:
    """The rows of each batch, and what the model has become; without ``make`` the ``Trainer``'s own loader."""
    import accelerate.data_loader
    import transformers

    accelerate.data_loader.DataLoader = pg.DataLoader
    transformers.utils.logging.set_verbosity_error()
    steps: list[Any] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: Any, row: Any) -> dict[str, Any]:
            if self.training:
                steps.append(row.tolist())
            return {"loss": (self.layer(x) - x).square().mean()}

    class OnLoader(pg.TrainOnLoader, transformers.Trainer):  # type: ignore[misc]
        pass

    class Saving(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save |= state.global_step in saves and not resume

    updates = -(-STEPS // accumulate)
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        max_steps=stop if stop > 0 or length else EPOCHS * updates,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate,
        save_strategy="epoch" if ends else "no",
        eval_strategy="steps" if validate else "no",
        eval_steps=validate or None,
        dataloader_num_workers=workers,
        dataloader_pin_memory=False,
        lr_scheduler_type="constant",
        seed=7,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
    )
    transformers.set_seed(7)
    common: dict[str, Any] = {"eval_dataset": Rows(), "callbacks": [Saving()]}
    if make is None:
        trainer: Any = transformers.Trainer(Model(), arguments, train_dataset=Rows(), **common)
    else:
        trainer = OnLoader(Model(), arguments, loader=make(length, workers), **common)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=f"{folder}/{resume}" if resume else None)
    if make is graph:
        trainer._passes._loader.close()
    return [*steps, [each.tolist() for each in trainer.model.parameters()]]


def compare_trained(make: Any, folder: Path, case: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """The steps of the whole training, and the checkpoints after which a resumed one differs."""
    if "limit" in case:  # the Trainer's are of steps: a training that ended there continues with more
        trained(make, folder, stop=STEPS + 2, saves=(STEPS + 2,))
        every = trained(make, folder / "whole")
        rest = trained(make, folder, f"checkpoint-{STEPS + 2}")
        return every, [] if rest == every[STEPS + 2 :] else ["limit"]
    updates = -(-STEPS // case.get("accumulate", 1))
    case = {**case, "saves": (2, updates, updates + 1)}
    every = trained(make, folder, **case)
    wrong = []
    for checkpoint in sorted(path.name for path in folder.glob("checkpoint-*")):
        epochs, step = divmod(int(checkpoint.split("-")[1]), updates)
        if epochs == EPOCHS and not case.get("length", True):
            continue  # without a length the Trainer takes one step more than max_steps
        done = epochs * STEPS + step * case.get("accumulate", 1)
        if trained(make, folder, checkpoint, **case) != every[done:]:
            wrong.append(checkpoint)
    return every, wrong


# -- the table ---------------------------------------------------------------------------------

LOADERS: dict[str, dict[str, Any]] = {
    "ddp": {"DataLoader": (Plain, sampled), "graph": (Plain, graph)},
    "fsdp": {"DataLoader": (Sharded, sampled), "graph": (Sharded, graph)},
    "accelerate": {
        "DataLoader": (Accelerated, whole),
        "threads": (Accelerated, threads),
        "skip_first_batches": (Skipping, whole),
        "graph": (Accelerated, graph),
    },
    "transformers": {"Trainer's own": (None, None), "DataLoader": (None, sampled), "graph": (None, graph)},
}


def each_once(parts: list[list[Any]], limit: bool) -> bool:
    """Whether the ranks' steps have each row once in each epoch."""
    for epoch in range(EPOCHS):
        rows = [row for steps in parts for number, _, batch in steps if number == epoch for row in batch]
        if len(set(rows)) != len(rows) or not (limit or len(rows) == ROWS):
            return False
    return True


def cell(kind: Any, make: Any, folder: Path, case: dict[str, Any]) -> str:
    """What is wrong on any rank."""
    if kind is None:
        every, wrong = compare_trained(make, folder, case)
        rows = every[:-1]
        steps = [(number // STEPS, number, batch) for number, batch in enumerate(rows)]
    else:
        steps = loop(kind, make, folder, **case)
        wrong = []
        names = [f"step{done}" for done in case.get("saves", ())]
        names += [f"end{epoch}" for epoch in range(EPOCHS)] if case.get("ends") else []
        for name in names:
            ended = name[0] == "e"
            done = sum(step[0] <= int(name[3:]) for step in steps) if ended else int(name[4:])
            if loop(kind, make, folder, name, **case) != steps[done:]:
                wrong.append(name)
    found: list[Any] = [(steps, wrong)]
    if RANKS > 1:
        found *= RANKS
        dist.all_gather_object(found, (steps, wrong))
    once = each_once([each[0] for each in found], "limit" in case and kind is not None)
    return ", ".join([*([] if once else ["rows"]), *sorted({name for each in found for name in each[1]})])


def main(folder: Path, trainer: str) -> None:
    warnings.simplefilter("ignore")
    if trainer in ("ddp", "fsdp") and (RANKS > 1 or trainer == "fsdp"):
        if RANKS == 1:
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("gloo")
    found = {}
    for name, (kind, make) in LOADERS[trainer].items():
        for case, options in CASES.items():
            if not options.get("length", True) and (name in ("skip_first_batches", "Trainer's own")):
                continue  # these read a stream again from its start
            own = folder / f"{name} {case}".replace(" ", "_")
            shutil.rmtree(own, ignore_errors=True) if RANK == 0 else None
            own.mkdir(parents=True, exist_ok=True)
            if dist.is_initialized():
                dist.barrier()
            found[f"{name}: {case}"] = cell(kind, make, own, options)
    (folder / f"rank{RANK}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
