"""The worker loop that receives the sidecar's chunks in the training process.

Each answer also brings reports of the sidecar's stages for states (``log``). They are recorded before the chunks that
follow them are passed on, so that taking a state needs no call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from pipegraph.chunk import Chunk, EndOfEpoch, Failure
from pipegraph.engine.activity import Cancelled
from pipegraph.engine.contents import samples_in
from pipegraph.engine.process.contract import Died
from pipegraph.engine.process.sidecar import Sidecar, blame
from pipegraph.engine.stage.stage_run import StageRun
from pipegraph.engine.stage.unit import settle
from pipegraph.engine.stage_worker import Worker
from pipegraph.planning.kind import StageKind

log = logging.getLogger("pipegraph")


class SidecarKind(StageKind):
    """The kind of an ``Elsewhere``."""

    def loop(self, stage: StageRun, worker: Worker) -> Iterator[None]:
        return sidecar_loop(stage, worker)


def sidecar_loop(stage: StageRun, worker: Worker) -> Iterator[None]:
    """See the module docstring; run by one worker of the trainer."""
    run: Any = stage.run  # an IsolatedRun
    sidecar: Sidecar = worker.operator
    sender = stage.sender
    sidecar.number = run.number
    if run.stopping.is_set():  # cancelled before the sidecar knew its number: cancel it there too
        raise Cancelled
    try:
        sidecar.start_run(*run.start())
        epoch = run.first_epoch
        while True:
            run.horizon.wait_for(epoch, run.reads_ahead)
            items, reported, error = sidecar.next(stage.stop_epoch, run.horizon.limit, run.horizon.begun)
            record(run, reported)
            if error is not None:
                raise error.error()
            if not items:
                raise Cancelled
            for item in items:
                if isinstance(item, Chunk):
                    worker.meter.items += samples_in(item)
                    settle(stage, worker, 0, (), item)
                    sender.send(0, item)
                    continue
                if item.__class__ is Failure:
                    carried: Any = item.error
                    item.error = carried.error()
                elif item.__class__ is EndOfEpoch:
                    epoch = item.epoch + 1
                sender.send(0, item)
            del items, item
            yield
    except Died as died:
        run.fail(blame(died))
        raise Cancelled from None
    except Exception as error:
        run.fail(error)  # its notes name the stage
        raise Cancelled from None


def record(run: Any, reported: list[tuple[Any, ...]]) -> None:
    """Enter the reports of the sidecar's stages into the trainer's ledger and snapshots."""
    for what, *about in reported:
        if what == "took":
            run.ledger.took(*about)
        elif what == "failed":
            if run.ledger.add(*about):
                quarantined = about[3][0][1]
                log.warning(
                    "stage %r: sample %r, epoch %d, was left out or replaced: %s. on_error= says so; further ones are "
                    "only counted, and listed in loader.profile().quarantined",
                    *(quarantined.stage, quarantined.key, quarantined.epoch, quarantined.error),
                )
        elif what == "changed in place":
            run.changed_in_place.update(about)
        else:
            name, *snapshot = about
            run.snapshots[name].add(*snapshot)
