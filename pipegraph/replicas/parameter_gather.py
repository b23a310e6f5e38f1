"""Gathers parameters that sharded optimizers updated, during the next batch's copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch.nn import Parameter

from pipegraph.device import Backend, Slot


class Exchange:
    """Copies of stepped parameters, on one side stream per replica.

    Between :meth:`start` and a replica's :meth:`wait` that replica's parameters are not to be used.

    Args:
        parameters: per replica.
        owners: by parameter; None where every replica steps all: nothing is copied then, or waited for.
        indices: of the parameters that an optimizer steps.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Parameter]],
        owners: Sequence[int] | None,
        indices: Iterable[int],
        slots: Sequence[Slot],
        backends: Mapping[torch.device, Backend],
    ) -> None:
        self._parameters = parameters
        self._owners = owners or []
        self._indices = sorted(indices)
        self._backends = [backends[slot.device] for slot in slots]
        self._streams = [
            backend.stream(slot, f"gather-{number}")
            for number, (slot, backend) in enumerate(zip(slots, self._backends, strict=True))
        ]
        self._arrived = [backend.event() for backend in self._backends]
        self._read = [backend.event() for backend in self._backends]
        self._stepped: list[int] = []

    def start(self) -> None:
        """After all owners' steps, as the current streams see them. Returns at once."""
        if not self._owners:
            return
        # Frozen ones are not stepped.
        self._stepped = [i for i in self._indices if self._parameters[0][i].requires_grad]
        stepped = [backend.current_stream().record_event() for backend in self._backends]
        for replica, stream in enumerate(self._streams):
            for event in stepped:
                stream.wait_event(event)
            stream.run(lambda replica=replica: self._receive(replica))  # type: ignore[misc]
            stream.record_event(self._arrived[replica])
        # A copy between devices is made by its owner's stream too, also after the owner has all it receives.
        for stream, event in zip(self._streams, self._read, strict=True):
            stream.record_event(event)

    def _receive(self, replica: int) -> None:
        remote = [index for index in self._stepped if self._owners[index] != replica]
        mine = [self._parameters[replica][index] for index in remote]
        theirs = [self._parameters[self._owners[index]][index] for index in remote]
        with ExitStack() as stack:
            # A copy between devices is ordered on the current streams of both; the receiver's comes last.
            for owner in [*set(self._owners) - {replica}, replica]:
                stack.enter_context(self._backends[owner].use(self._streams[owner]))
            stack.enter_context(torch.no_grad())
            for here, there in zip(mine, theirs, strict=True):
                here.copy_(there, non_blocking=True)

    def wait(self, replica: int) -> None:
        """Make the current stream wait for a replica's parameters. Raises what the copies raised."""
        self._arrived[replica].wait()

    def settle(self) -> None:
        """The same for all replicas; and owners may write their parameters again, which nobody copies any more."""
        for replica, event in enumerate(self._read):
            self.wait(replica)
            event.wait()
