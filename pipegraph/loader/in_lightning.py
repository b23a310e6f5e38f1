"""Loaders inside Lightning: exact resumes from Lightning's checkpoints, through a callback.

Lightning iterates a ``CombinedLoader``: when it sets up the data, and again at the start of each later epoch. It
stops after a number of batches (without a length it fetches one batch ahead), and saves ``state_dict()`` of the
loaders as they are at that moment. The callback puts another ``CombinedLoader`` in its place, which knows from
Lightning's counters which batches were trained on, and restores the loaders before it iterates them. Lightning is
imported when a ``Trainer`` is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from pipegraph.errors import PipegraphWarning, StateError
from pipegraph.loader.loader import Loader
from pipegraph.loader.state import needs_its_place
from pipegraph.loader.torch_dataloader.batch_progress import tensor_of, text_of
from pipegraph.loader.torch_dataloader.dataloader import DataLoader

KEY = "trained_on"


def lightning_callback(package: str = "lightning.pytorch") -> Any:
    """A callback that makes resumes from Lightning's checkpoints exact for pipegraph's training loaders.

    Installing pipegraph with pip registers it with every ``Trainer``; elsewhere add it:
    ``Trainer(callbacks=[pg.lightning_callback()])``. A second one does nothing.

    Args:
        package: that of your ``Trainer``, ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
    """
    return _classes(package)[0]()


def pytorch_lightning_callback() -> Any:
    """:func:`lightning_callback` for the package ``pytorch_lightning``."""
    return lightning_callback("pytorch_lightning")


@cache
def _classes(package: str) -> tuple[Any, Any]:
    """The classes of the callback and of the combined loader."""
    base = import_module(f"{package}.callbacks").Callback
    module = import_module(f"{package}.utilities.combined_loader")
    return (
        type("ResumeLoaders", (_ResumeLoaders, base), {"package": package}),
        type("TrainedOn", (_TrainedOn, module.CombinedLoader), {"module": module}),
    )


def _is_ours(loader: Any) -> bool:
    return isinstance(loader, Loader | DataLoader)


class _ResumeLoaders:
    """The callback.

    Attributes:
        saved: what the checkpoint says of the loaders, until they are restored.
        reloaded: the epoch in which the run that was saved had last reloaded its loaders.
        current: the combined loader that was iterated last.
    """

    package: str
    saved: dict[str, Any] | None = None
    reloaded: float | None = None
    current: _TrainedOn | None = None
    _active = False

    def __reduce__(self) -> Any:  # for strategies that send the trainer to processes they start
        return lightning_callback, (self.package,)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The first hook of ``fit``: take over where the trainer gets its loaders from."""
        source = trainer.fit_loop._data_source
        if stage == "fit" and "dataloader" not in vars(source):
            self._active = True
            source.dataloader = _Combining(self, trainer, source.dataloader)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Called before the trainer restores its loops and sets up the data."""
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        states = loop.get("state_dict", {}).get("combined_loader")
        if not (self._active and states and trainer.state.fn == "fit"):
            return
        if KEY in states[0]:
            self.saved = states[0]
            self.reloaded = None if states[0][KEY]["anew"] else states[0][KEY]["reloaded"]
            _straighten(loop, states[0][KEY])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """After the data was set up; with some strategies that was before the checkpoint was read."""
        if self.saved is not None and self.current is not None:
            iter(trainer.fit_loop._data_fetcher)
        if self.reloaded is not None:
            trainer.fit_loop._last_train_dl_reload_epoch, self.reloaded = self.reloaded, None


class _Combining:
    """Replaces the method from which Lightning's fit loop gets its loaders."""

    def __init__(self, callback: _ResumeLoaders, trainer: Any, given: Callable[[], Any]) -> None:
        self._callback = callback
        self._trainer = trainer
        self._given = given

    def __call__(self) -> Any:
        loaders = self._given()
        kind = _classes(self._callback.package)[1]
        plain = kind.module.CombinedLoader
        combined = loaders if isinstance(loaders, plain) else plain(loaders, "max_size_cycle")
        if type(combined) is not plain or not any(map(_is_ours, combined.flattened)):
            return loaders
        if combined._mode == "sequential":  # the fit loop refuses it
            return loaders
        found = kind(combined.iterables, combined._mode)
        found.callback, found.trainer = self._callback, self._trainer
        return found


class _TrainedOn:
    """Lightning's combined loader, whose state describes the batches that were trained on.

    Attributes:
        module: the module of the base class.
    """

    module: Any
    callback: _ResumeLoaders
    trainer: Any
    flattened: list[Any]
    _mode: str
    _iterator: Any
    _limits: Any

    _lengths: Any = ()
    _epoch = -1
    _fetched = 0  # batches of this pass
    _first: Sequence[Any] = ()  # the first batch, until there is a second one
    _again: list[Any] = []  # batches that were fetched already, for the same pass
    _skipped = 0  # batches of the epoch that came before this pass
    _before: tuple[dict[str, Any], ...] = ()  # where the loaders were before the last two fetches
    _over = False  # whether a checkpoint was taken behind the epoch's last batch, and Lightning now ends that epoch

    def __iter__(self) -> Any:
        callback = self.callback
        saved, callback.saved = callback.saved, None
        place = saved[KEY] if saved else {}
        epoch = place.get("epoch", self.trainer.fit_loop.epoch_progress.current.processed)
        if not (saved or self._over) and epoch == self._epoch and self._fetched == len(self._first):
            self._again = list(self._first)  # nothing of this pass was trained on
            return self
        self._take_over_from(callback.current)
        callback.current = self
        self._epoch = epoch
        for loader in self.flattened:
            # A graph's loader counts its own passes; a new one begins where the trainer is.
            if isinstance(loader, DataLoader) or (isinstance(loader, Loader) and loader.epoch < epoch):
                loader.set_epoch(epoch)
        self._fetched, self._before, self._first, self._again = 0, (), [], []
        self._skipped = place.get("batches", 0)
        self._over = place.get("over", False)
        # Before a load, and else behind the start: a loader may say how much is left of its pass.
        self._lengths = self.module._get_iterables_lengths(self.flattened)
        if saved:
            self._restore(saved)
        if self._over:
            self._iterator = self.module._SUPPORTED_MODES[self._mode]["iterator"](
                self.flattened, self._limits
            )
            return self
        super().__iter__()  # type: ignore[misc]
        if not saved:
            self._lengths = self.module._get_iterables_lengths(self.flattened)
        elif not place["ended"]:
            own = self._own(saved)
            self._put_random(own)  # resuming a pass draws from it again
            if own["consumed"]:
                self._iterator._consumed = list(own["consumed"])
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        if self._again:
            return self._again.pop()
        before = self._now()
        found = super().__next__()  # type: ignore[misc]
        self._before = (*self._before[-1:], before)
        self._fetched += 1
        self._first = [found] if self._fetched == 1 else []
        for number, loader in enumerate(self.flattened):
            if isinstance(loader, Loader) and self._skipped + self._fetched == self._lengths[number]:
                next(self._iterator.iterators[number], None)  # ends its pass, as a `for` loop does
        return found

    def __len__(self) -> int:
        lengths = self._lengths if self._limits is None else list(map(min, self._lengths, self._limits))
        if self._mode == "min_size":
            lengths = [min(lengths)]
        return max(lengths)  # type: ignore[no-any-return]

    # -- random numbers ------------------------------------------------------------------------

    def _take_over_from(self, other: _TrainedOn | None) -> None:
        """Give each loader a random state of its own to draw orders and seeds from.

        With torch's global one, orders would depend on what the model and validation draw, which a resumed run does not
        repeat.
        """
        if other is self:
            return
        before = [] if other is None else other.flattened
        for number, loader in enumerate(self.flattened):
            if isinstance(loader, DataLoader) and loader._random is None:
                old = before[number] if number < len(before) else None
                loader._random = getattr(old, "_random", None)
                if loader._random is None:
                    loader._random = torch.get_rng_state()
                    torch.empty((), dtype=torch.int64).random_()  # what follows draws other numbers

    def _put_random(self, own: dict[str, Any]) -> None:
        for loader, state in zip(self.flattened, own["random"], strict=True):
            if isinstance(loader, DataLoader) and state:
                loader._random = tensor_of(state)

    # -- the state -----------------------------------------------------------------------------

    def _now(self) -> dict[str, Any]:
        """Where this rank's loaders are."""
        return {
            "states": [each.state_dict() if _is_ours(each) else None for each in self.flattened],
            "random": [getattr(each, "_random", None) for each in self.flattened],
            "consumed": list(getattr(self._iterator, "_consumed", ())),
        }

    def _state_dicts(self) -> list[dict[str, Any]]:
        """One state for all loaders, and all ranks; a collective, as Lightning's saving is."""
        loops = self.trainer.fit_loop
        epoch, batch = loops.epoch_progress.current, loops.epoch_loop.batch_progress.current
        trained = batch.processed - self._skipped
        if not 0 <= trained <= self._fetched:
            trained = 0  # Lightning still counts the batches of the pass before
        ended = batch.ready == batch.processed and loops.epoch_loop._num_ready_batches_reached()
        place = {"epoch": epoch.processed, "batches": 0, "over": self._over, "ended": True}
        place |= {"anew": False, "reloaded": loops._last_train_dl_reload_epoch}
        if self._over or (trained and ended):
            own = self._now()
            own["within"] = [needs_its_place(state) for state in own["states"]]
            own["states"] = [
                state if within or not _is_ours(each) else each._state(ended=True)
                for each, state, within in zip(self.flattened, own["states"], own["within"], strict=True)
            ]
            # Not `ready`: this is counted before on_train_epoch_start, and the pass begins after it.
            place["over"] = epoch.processed < epoch.started and batch.completed == batch.processed
            place["epoch"] = epoch.started
            every = self.trainer.reload_dataloaders_every_n_epochs
            place["anew"] = bool(every) and epoch.started - loops._last_train_dl_reload_epoch >= every
        else:
            ahead = self._fetched - trained
            if ahead > len(self._before):
                warnings.warn(
                    f"training_step(dataloader_iter) has fetched {ahead} batches that are not trained on yet, of "
                    f"which a resume repeats the last {len(self._before)}: fetch one batch in each step",
                    PipegraphWarning,
                    stacklevel=2,
                )
            own = dict(self._before[-ahead:][0]) if ahead and self._before else self._now()
            place |= {"batches": self._skipped + trained, "ended": False}
            if place["batches"]:
                place["epoch"] = epoch.started - 1
        own["random"] = [None if each is None else text_of(each) for each in own["random"]]
        own["others"] = [each.state_dict() if self._is_stateful(each) else None for each in self.flattened]
        ranks = [own]
        if self.trainer.world_size > 1:
            ranks *= self.trainer.world_size
            dist.all_gather_object(ranks, own)
        return [{KEY: place, "ranks": ranks}]

    def _is_stateful(self, loader: Any) -> bool:
        return not _is_ours(loader) and isinstance(loader, self.module._Stateful)

    def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Called by Lightning in some of its restarts. What this class saved is restored in ``__iter__``, in all."""
        if states and KEY not in states[0]:
            warnings.warn(
                "this checkpoint was saved without pg.lightning_callback(): if it was saved at an epoch's end, or with "
                "a loader that has no length, its resume loses batches",
                PipegraphWarning,
                stacklevel=2,
            )
            super()._load_state_dicts(states)  # type: ignore[misc]

    def _own(self, saved: dict[str, Any]) -> dict[str, Any]:
        """This rank's part, or at another world size the first rank's."""
        ranks = saved["ranks"]
        found: dict[str, Any] = ranks[
            self.trainer.global_rank if len(ranks) == self.trainer.world_size else 0
        ]
        return found

    def _restore(self, saved: dict[str, Any]) -> None:
        ranks, own = saved["ranks"], self._own(saved)
        if len(own["states"]) != len(self.flattened):
            raise StateError(
                f"the checkpoint is of {len(own['states'])} training loaders and this trainer has "
                f"{len(self.flattened)}: give it the same loaders in the same order"
            )
        resized = len(ranks) != self.trainer.world_size
        self._put_random(own)
        if saved[KEY]["anew"]:
            return
        for number, (loader, state, other) in enumerate(
            zip(self.flattened, own["states"], own["others"], strict=True)
        ):
            if self._is_stateful(loader) and other is not None:
                loader.load_state_dict(other)
            elif resized and isinstance(loader, Loader):
                loader.load_state_dict([each["states"][number] for each in ranks])
            elif resized and self._skipped:
                raise StateError(
                    f"the checkpoint was saved in the middle of an epoch by {len(ranks)} ranks, and there are "
                    f"{self.trainer.world_size} now: a pg.DataLoader resumes with {len(ranks)} ranks, or from an "
                    "epoch's end; the loader of a graph also at other numbers"
                )
            elif _is_ours(loader):
                loader.load_state_dict(state)
            if own.get("within") and own["within"][number]:
                next(iter(loader), None)


def _straighten(loop: dict[str, Any], place: dict[str, Any]) -> None:
    """Make Lightning's counters in a checkpoint agree with where the loaders are.

    Saved behind the last batch, or where training was stopped within an epoch, they say that the epoch is neither
    running nor over, and Lightning then repeats or skips one, at this resume or the next.
    """
    epochs, batches = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
    processed = batches["total"]["processed"]
    batches["total"] |= {"ready": processed, "started": processed}
    if place["over"]:
        return
    if place["ended"] and epochs["current"]["processed"] < epochs["current"]["started"]:
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
    done = place["epoch"]
    begun = done + (place["batches"] > 0)
    earlier = epochs["total"]["ready"] - epochs["current"]["ready"]  # by trainers before
    for each, offset in ((epochs["current"], 0), (epochs["total"], earlier)):
        each |= {"ready": begun + offset, "started": begun + offset}
        each |= {"processed": done + offset, "completed": done + offset}
    batches["is_last_batch"] = False
    if not place["batches"]:
        batches["total"]["completed"] = processed
        batches["current"] |= dict.fromkeys(("ready", "started", "processed", "completed"), 0)
