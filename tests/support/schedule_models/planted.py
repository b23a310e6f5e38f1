"""Faults planted in the engine, each one edit, to see that a model finds it."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from scheduler.lines import with_points
from scheduler.model import Model

from pipegraph.engine import activity, channel, contents, reorder, worker_thread
from pipegraph.engine.stage import horizon, sender
from pipegraph.reader import block_reader
from schedule_models.pipelines import Completion, ThreeStages
from schedule_models.queues import ChannelModel, SequencedChannelModel
from schedule_models.readers import BlockReaderModel


@dataclass(frozen=True)
class Fault:
    """One edit of a function, and the model that finds it.

    Attributes:
        lines: files of which every line must be a switch point for it to be found.
    """

    name: str
    function: Callable[..., Any]
    old: str
    new: str
    model: type[Model]
    lines: tuple[str, ...] = ()


FAULTS = (
    Fault(
        "a putter leaves the queue before it is woken: Ctrl-C between the two loses it",
        channel.Channel._let_in,
        "            first.wake(self.activity)\n            self._putters.remove(first)\n",
        "            self._putters.remove(first)\n            first.wake(self.activity)\n",
        ChannelModel,
    ),
    Fault(
        "a reader is not woken for what arrives",
        channel.Channel._arrived,
        "if self._getters and not more:",
        "if self._getters and not more and len(self._getters) > 1:",
        ChannelModel,
    ),
    Fault(
        "a queue holds one item too many",
        contents.Contents.admits,
        "(after <= room and fits)",
        "(after <= room + 1 and fits)",
        ChannelModel,
    ),
    Fault(
        "what finished late leaves before its turn",
        reorder.ReorderBuffer.add,
        "if seq == self.next:",
        "if seq <= self.next + 1:",
        SequencedChannelModel,
    ),
    Fault(
        "the reader looks for an item without the lock, then queues itself",
        channel.Channel.take,
        "                    self._getters.append(waiter)\n                    self._has_changed()\n"
        "            if pump",
        "                    pass\n            if pump is None:\n                self._getters.append(waiter)\n"
        "            if pump",
        ChannelModel,
    ),
    Fault(
        "cancel does not wake the putters",
        channel.Channel.cancel,
        "(*self._putters, *self._getters)",
        "(*self._getters,)",
        ChannelModel,
    ),
    Fault(
        "a woken thread is counted as waiting",
        activity.Activity.resume,
        "self._running += 1",
        "self._running += 0",
        ThreeStages,
    ),
    Fault(
        "an epoch is allowed, and its source not woken",
        horizon.Horizon.raise_to,
        "            self._wake()",
        "            pass",
        ThreeStages,
    ),
    Fault(
        "a flag is read before the lock is taken",
        worker_thread.await_run,
        "    threads.wait_until(lambda: worker.run is not None or ended(crew, worker))",
        "    over = ended(crew, worker)\n    threads.wait_until(lambda: worker.run is not None or over)",
        ThreeStages,
    ),
    Fault(
        "the end of an epoch does not wait for an item in work",
        sender.AsFinished.token,
        "if any(epoch == token.epoch for epoch, _ in self._open.values()):",
        "if False:",
        Completion,
    ),
    Fault(
        "a block has arrived, and no worker is told",
        block_reader.BlockReader._load,
        "            self._arrived.notify_all()\n",
        "            pass\n",
        BlockReaderModel,
    ),
)


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """While inside, the engine has the fault."""
    function: Any = fault.function
    source = textwrap.dedent(inspect.getsource(function))
    old, new = _aligned(fault.old, function), _aligned(fault.new, function)
    assert source.count(old) == 1, (
        f"{fault.name}: the code has changed, {old!r} is there {source.count(old)} times"
    )
    made: dict[str, Any] = {}
    tree = ast.parse(source.replace(old, new))
    if fault.lines:
        tree = with_points(tree)
    exec(compile(tree, inspect.getfile(function), "exec"), function.__globals__, made)
    before = function.__code__
    function.__code__ = made[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = before


def _aligned(text: str, function: Any) -> str:
    """Text as it stands in a class, as it stands in the dedented method."""
    first = inspect.getsource(function).splitlines()[0]
    indent = first[: len(first) - len(first.lstrip())]
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))
