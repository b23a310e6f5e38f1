"""Loaders inside Hugging Face's ``Trainer``: exact resumes from its checkpoints, for graphs and streams too.

The ``Trainer`` knows batches by their number: it reads the epoch of a checkpoint again up to there, and asks a loader's
length for where that is. Here it trains on a loader as it is. The loader's state is in each checkpoint, is loaded once
the ``Trainer`` has asked for the length, and takes the place of reading again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pipegraph.errors import StateError
from pipegraph.loader.loader import Loader
from pipegraph.loader.state import needs_its_place
from pipegraph.loader.torch_dataloader.dataloader import DataLoader


class TrainOnLoader:
    """For a class of your own, before Hugging Face's ``Trainer``, which then trains on a loader of pipegraph::

        class Trainer(pg.TrainOnLoader, transformers.Trainer):
            pass

        trainer = Trainer(model, arguments, loader=graph.loader(epochs=10))
        trainer.train(resume_from_checkpoint=True)

    A resumed training gets the batches that the uninterrupted one would have got. The loader is not prepared by
    Accelerate: it splits the data among the ranks by itself.

    Args:
        loader: a graph's loader, or a ``pg.DataLoader``.

    Raises:
        TypeError: ``loader`` is another, or prepared by Accelerate; or there is a ``train_dataset`` too.
        StateError: a state was loaded into ``loader`` already; or the checkpoint has none, or one of other ranks.
    """

    args: Any

    def __init__(self, *arguments: Any, loader: Any, **options: Any) -> None:
        if not issubclass(type(loader), Loader | DataLoader):  # a prepared one says that it is an instance
            raise TypeError(
                f"loader must be a graph.loader() or a pg.DataLoader, not prepared by Accelerate, got {type(loader)}"
            )
        if loader._progress.place.restored if isinstance(loader, Loader) else loader._restored is not None:
            raise StateError(
                "a state was loaded into this loader: leave that out, train(resume_from_checkpoint=...) does it, once "
                "the Trainer has asked how long an epoch is"
            )
        super().__init__(*arguments, **options)
        if getattr(self, "train_dataset", None) is not None:
            raise TypeError("loader= takes the place of train_dataset=: leave train_dataset out")
        self._passes = _Passes(loader)
        self.args.ignore_data_skip = (
            False  # the Trainer counts the batches of the epoch, and nothing is skipped
        )

    def get_train_dataloader(self) -> Any:
        return self._passes

    def _inner_training_loop(self, *arguments: Any, **options: Any) -> Any:
        module: Any = sys.modules["transformers.trainer"]
        skip = module.skip_first_batches
        module.skip_first_batches = lambda loader, count: (
            loader if isinstance(loader, _Passes) else skip(loader, count)
        )
        self._passes.restart()
        try:
            return super()._inner_training_loop(*arguments, **options)  # type: ignore[misc]
        finally:
            module.skip_first_batches = skip

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        torch.save({"ranks": self.args.world_size, **self._passes.state()}, self._path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None:
            return
        path = self._path(checkpoint)
        if not path.exists():
            raise StateError(
                f"{path} does not exist: the checkpoint was saved without pg.TrainOnLoader, with save_only_model, or "
                "by fewer ranks; train from its weights with resume_from_checkpoint=None"
            )
        saved = torch.load(path, weights_only=False)
        if saved["ranks"] != self.args.world_size:
            raise StateError(
                f"{checkpoint} was saved by {saved['ranks']} ranks and there are {self.args.world_size}: the Trainer "
                f"counts steps of {saved['ranks']} ranks; resume with as many"
            )
        self._passes.load(saved)

    def _path(self, folder: str) -> Path:
        return Path(folder) / f"loader{self.args.process_index}.pt"


class _Passes:
    """A loader that counts its own passes: without a length the ``Trainer`` counts others."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        try:
            self._length: int | None = len(loader)
        except TypeError:
            self._length = None
        self.restart()

    def restart(self) -> None:
        """A training begins."""
        self._epoch = self._batches = 0  # of the pass that began last
        self._begun = self._restored = False
        running = self._loader._running() if isinstance(self._loader, Loader) else None
        if running is not None:
            running.end("a new training has begun")

    def __len__(self) -> int:
        return len(self._loader) if self._length is None else self._length

    def set_epoch(self, epoch: int) -> None:
        """Called by the ``Trainer``."""

    def __iter__(self) -> Iterator[Any]:
        restored, self._restored = self._restored, False
        if self._begun:
            self._next()
        while True:
            self._begun = True
            self._loader.set_epoch(self._epoch)
            before = self._batches
            for batch in self._loader:
                self._batches += 1
                yield batch
            empty = self._batches == before
            self._next()
            if not (restored and empty):
                return
            restored = False  # it was saved behind the last batch

    def _next(self) -> None:
        self._epoch, self._batches, self._begun = self._epoch + 1, 0, False

    # -- state ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Of the batches that were delivered; behind the last one of the next pass."""
        state = self._loader.state_dict()
        # A source with a state may not have come to the end yet, from which the next epoch's begins.
        ended = self._length is not None and self._batches >= self._length and not needs_its_place(state)
        return {
            "epoch": self._epoch + ended,
            "batches": 0 if ended else self._batches,
            "loader": self._loader._state(ended=True) if ended else state,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state["loader"])
        self._epoch, self._batches = state["epoch"], state["batches"]
        self._begun, self._restored = False, True
