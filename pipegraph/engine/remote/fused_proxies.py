"""The proxy of several fused stages that run in one process; see ``composed``.

To the engine they are the first stage, and the others' work is done in the same call. Each stage's own data comes back
with the rows: the keys that it fixed, its failures, its counters, and which stage was at work when the process died or
an item took too long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from pipegraph.bundle import UNNAMED, Bundle, named
from pipegraph.chunk import Chunk
from pipegraph.engine.meter import Meter
from pipegraph.engine.remote.composed import Report
from pipegraph.engine.remote.contract import Call
from pipegraph.engine.remote.proxies import RemoteMap, RemoteSource


class RemoteRun(RemoteMap):
    """The proxy of fused stages that begin with a one-to-one stage.

    Attributes:
        failed_in: number of the stage that raised the last error.
        others_ns: nanoseconds that the other stages have worked.
    """

    failed_in = 0
    others_ns = 0
    _names: Sequence[str] = ()
    _meters: Sequence[Meter] = ()

    def follow(self, names: Sequence[str], meters: Sequence[Meter]) -> None:
        """Set the names of the stages, including the first, and their meters."""
        self._names, self._meters = names, meters

    def call_for(self, chunk: Chunk) -> Call | None:
        """Batches are sent as they are; for a row the call is not known before its turn."""
        return super().call_for(chunk) if chunk.batched else None

    def process(self, chunk: Chunk) -> Chunk:
        if chunk.batched:
            self.failed_in = len(self._names) - 1  # an error of sending is attributed to the last stage
            out: Chunk = super().process(chunk)
            return out
        names = None if chunk._keys is None else [chunk._keys[0]]
        one = Bundle(
            [chunk.data], chunk.lineages, chunk.epoch, chunk.before, names, [(chunk.before, chunk.after)]
        )
        self.fill(one)
        made: list[Any] = []
        try:
            self.work_into(made, one, 0)
        finally:
            if one.names is not None and one.names[0] is not UNNAMED:
                chunk.keys = (one.names[0],)
        chunk.data = made[0]
        return chunk

    def work_into(self, made: list[Any], bundle: Bundle, start: int, stop: int | None = None) -> None:
        self.failed_in = len(self._names) - 1  # as above
        super().work_into(made, bundle, start, stop)

    def fill(self, bundle: Bundle) -> None:
        """Prepare a bundle's rows for sending."""
        bundle.names = named(bundle.data, bundle.names)

    def _note(self, given: Any, at: int, report: Report) -> None:
        names, self.failed_in, figures = report
        self._fix_names(given, at, names)
        samples = 1 if isinstance(given, Bundle) else len(given.lineages)
        for member, (spent_ns, begun, made) in enumerate(figures):
            meter = self._meters[member]
            if member:
                meter.worked(spent_ns)
                meter.calls += begun
                self.others_ns += spent_ns
            if member < len(self._meters) - 1:  # the last stage's items are counted as sent
                meter.items += made
                meter.samples += made * samples

    def _identify(self, given: Any, row: int, member: int) -> None:
        if row >= 0 and member:
            with contextlib.suppress(Exception):
                self._fix_names(
                    given, row, self._host.call("invoke", "names", given.part(row, row + 1), member)
                )

    def _fix_names(self, bundle: Any, at: int, names: list[Any] | None) -> None:
        if names is not None:
            known = [UNNAMED] * len(bundle.lineages) if bundle.names is None else list(bundle.names)
            known[at : at + len(names)] = names
            bundle.names = known

    def _stage_of(self, member: int) -> str:
        self.failed_in = member
        return self._names[member] if self._names else self._stage


class SourceRun(RemoteRun, RemoteSource):
    """The proxy of fused stages that begin with a random-access source."""

    def fill(self, bundle: Bundle) -> None:
        """Turn positions into indices, in the trainer, where samplers draw."""
        bundle.data = self._operator.indices_of(bundle.data, bundle.epoch)
