"""Buckets of gradients, planned from sizes and order of use, and the side streams that sum them over replicas.

Side streams touch buckets only, never gradients, so no allocator needs to know of them. Sums are made in the
order of the replicas, so they repeat bit by bit; with NCCL they repeat on one topology.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import torch

from pipegraph.device.backend import Backend, Event, Slot, Stream
from pipegraph.replicas.replicate import flat_like

# As in DDP: large enough that a transfer's fixed cost is nothing, and a small
# first one so that reduction starts as soon as backward does.
BUCKET_BYTES = 25 * 1024 * 1024
FIRST_BUCKET_BYTES = 1024 * 1024
# Every gradient starts at a multiple of this, so vector loads stay aligned.
ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients of one type that are reduced together, on replica `owner`'s side stream.

    `offsets`: by parameter its place, in elements.
    """

    dtype: torch.dtype
    offsets: dict[int, int]
    numel: int
    owner: int


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    replicas: int,
    first_bytes: int = FIRST_BUCKET_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[GradientBucket, ...]:
    """Buckets in the order in which they are expected to be full.

    Args:
        parameters: of one replica.
        order: indices in the expected order of their gradients' arrival.
        replicas: buckets are dealt to replicas in turn, so that each reduces its share.
    """
    open_buckets: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    closed: list[tuple[torch.dtype, list[int]]] = []
    for index in order:
        key = parameters[index].dtype
        open_buckets.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, 0) + parameters[index].nbytes
        if sizes[key] >= (bucket_bytes if closed else first_bytes):
            closed.append((key, open_buckets.pop(key)))
            sizes[key] = 0
    closed.extend(open_buckets.items())
    return tuple(
        _laid_out(parameters, key, indices, number % replicas) for number, (key, indices) in enumerate(closed)
    )


def _laid_out(
    parameters: Sequence[torch.Tensor], dtype: torch.dtype, indices: Sequence[int], owner: int
) -> GradientBucket:
    step = max(1, ALIGN_BYTES // dtype.itemsize)
    offsets, end = {}, 0
    for index in indices:
        offsets[index] = end
        end += -(-parameters[index].numel() // step) * step
    return GradientBucket(dtype, offsets, end, owner)


@dataclass
class LiveBucket:
    """A bucket's memory and events: buffers and views by replica, views and arrivals by parameter.

    `left` (by replica the gradients that are still to come) and `marked` belong to one step and are guarded by the
    reducer's lock. `seen`: by replica the
    streams that have written since the last launch. `arrivals`: by replica an event for each such stream, recorded
    once the replica has written all it will write, in this step.
    """

    plan: GradientBucket
    buffers: list[torch.Tensor]
    views: list[dict[int, torch.Tensor]]
    summed: Event
    filled: list[Event]
    arrivals: list[list[Event]]
    seen: list[set[Stream]]
    left: list[int] = field(default_factory=list)
    marked: set[tuple[int, int]] = field(default_factory=set)

    def contributors(self) -> list[int]:
        """Replicas that have written a gradient, in order."""
        return sorted({replica for replica, _ in self.marked})


class ReduceStreams:
    """One side stream per replica.

    Args:
        backends: by device; their owner closes them, and with them the streams made here.
    """

    def __init__(self, slots: Sequence[Slot], backends: Mapping[torch.device, Backend]) -> None:
        self._slots = list(slots)
        self._backends = [backends[slot.device] for slot in slots]
        self._side = [
            backend.stream(slot, f"reduce-{number}")
            for number, (slot, backend) in enumerate(zip(self._slots, self._backends, strict=True))
        ]
        self._used = [backend.event() for backend in self._backends]
        self._scratch: dict[tuple[int, torch.dtype, str], torch.Tensor] = {}
        distinct = len(slots) == len(backends) > 1
        self._fused = distinct and all(backend.sums_together for backend in self._backends)

    def make(self, plan: GradientBucket, parameters: Sequence[Sequence[torch.Tensor]]) -> LiveBucket:
        """Memory and events for a planned bucket, with views shaped and strided like `parameters`."""
        buffers = [torch.zeros(plan.numel, dtype=plan.dtype, device=slot.device) for slot in self._slots]
        views = [
            {
                index: flat_like(buffer.narrow(0, offset, given[index].numel()), given[index])
                for index, offset in plan.offsets.items()
            }
            for buffer, given in zip(buffers, parameters, strict=True)
        ]
        self._await_zeros()
        events = [backend.event() for backend in self._backends]
        arrivals: list[list[Event]] = [[] for _ in buffers]
        seen: list[set[Stream]] = [set() for _ in buffers]
        summed = self._backends[plan.owner].event()
        return LiveBucket(plan, buffers, views, summed, events, arrivals, seen)

    def put(self, live: LiveBucket, replica: int, index: int, grad: torch.Tensor | None) -> None:
        """A gradient (None: zeros) into its bucket, on the current stream; called by hooks."""
        current = self._backends[replica].current_stream()
        if current not in live.seen[replica]:
            self._await_readers(live, current)
            live.seen[replica].add(current)
        view = live.views[replica][index]
        with torch.no_grad():
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad)

    def arrived(self, live: LiveBucket, replica: int) -> None:
        """A replica has put all it has into a bucket."""
        live.arrivals[replica] = [stream.record_event() for stream in live.seen[replica]]

    def used(self, replica: int) -> None:
        """The current stream has read all it needs of a replica's buckets."""
        self._used[replica] = self._backends[replica].current_stream().record_event()

    def launch(self, live: LiveBucket, contributors: Sequence[int]) -> None:
        """Give the sum of a bucket, and its way back, to the side streams. Waits for nothing."""
        owner = live.plan.owner
        lead = self._side[owner]
        given = list(contributors) or [owner]
        self._await_arrivals(live, given)
        for seen in live.seen:
            seen.clear()
        self._await_users(given)
        if self._fused:
            self._launch_fused(live, given)
            return
        lead.run(lambda: self._sum(live, given))
        lead.record_event(live.summed)
        for replica, stream in enumerate(self._side):
            if replica != owner:
                self._await_summed(live, stream)
                stream.run(self._copy_to(live, replica))
                stream.record_event(live.filled[replica])

    def drain(self, buckets: Sequence[LiveBucket]) -> None:
        """After a failed step: wait until all side streams are idle, whatever has failed there."""
        for stream in self._side:
            with suppress(Exception):
                stream.synchronize()
        for live in buckets:
            for seen in live.seen:
                seen.clear()

    def _launch_fused(self, live: LiveBucket, contributors: Sequence[int]) -> None:
        """By the vendor (NCCL): sums into all buffers at once."""
        for replica, stream in enumerate(self._side):
            if replica not in contributors:
                stream.run(live.buffers[replica].zero_)
        self._backends[0].sum_together(live.buffers, self._side)
        for replica, stream in enumerate(self._side):
            stream.record_event(live.filled[replica])

    def _sum(self, live: LiveBucket, contributors: Sequence[int]) -> None:
        """On the owner's side stream: the sum over contributors, in their order, into the owner's buffer."""
        target = live.buffers[live.plan.owner]
        with torch.no_grad():
            total = self._landed(live, contributors[0], "total")
            for replica in contributors[1:-1]:
                out = self._space(live, "total")
                torch.add(total, self._landed(live, replica, "part"), out=out)
                total = out
            if len(contributors) > 1:
                torch.add(total, self._landed(live, contributors[-1], "part"), out=target)
            elif total is not target:
                target.copy_(total)

    def _landed(self, live: LiveBucket, replica: int, space: str) -> torch.Tensor:
        """A replica's buffer as the owner's device can read it."""
        buffer = live.buffers[replica]
        if buffer.device == live.buffers[live.plan.owner].device:
            return buffer
        landing = self._space(live, space)
        # A copy between devices is ordered on both devices' current streams.
        with self._streams(replica, live.plan.owner):
            return landing.copy_(buffer, non_blocking=True)

    def _space(self, live: LiveBucket, use: str) -> torch.Tensor:
        """Scratch of the owner's side stream; its order is the only guard it needs."""
        key = (live.plan.owner, live.plan.dtype, use)
        space = self._scratch.get(key)
        if space is None or space.numel() < live.plan.numel:
            device = self._slots[live.plan.owner].device
            space = torch.empty(live.plan.numel, dtype=live.plan.dtype, device=device)
            self._scratch[key] = space
        return space.narrow(0, 0, live.plan.numel)

    def _copy_to(self, live: LiveBucket, replica: int) -> Callable[[], None]:
        """For the replica's side stream: the owner's sum into its own buffer."""

        def copy() -> None:
            with torch.no_grad(), self._streams(live.plan.owner, replica):
                live.buffers[replica].copy_(live.buffers[live.plan.owner], non_blocking=True)

        return copy

    def _streams(self, *replicas: int) -> ExitStack:
        stack = ExitStack()
        for replica in replicas:
            stack.enter_context(self._backends[replica].use(self._side[replica]))
        return stack

    # The waits, each of which a test removes

    def _await_zeros(self) -> None:
        """The caller's streams zero a new bucket, which side streams write without a hook where a replica is idle."""
        for backend, stream in zip(self._backends, self._side, strict=True):
            stream.wait_event(backend.current_stream().record_event())

    def _await_arrivals(self, live: LiveBucket, contributors: Iterable[int]) -> None:
        """The sum reads what the hooks have written."""
        for replica in contributors:
            for event in live.arrivals[replica]:
                self._side[replica].wait_event(event)  # which reads the buffer for a copy to another device
                if replica != live.plan.owner:
                    self._side[live.plan.owner].wait_event(event)

    def _await_summed(self, live: LiveBucket, stream: Stream) -> None:
        """Copies read the sum."""
        stream.wait_event(live.summed)

    def await_filled(self, live: LiveBucket) -> None:
        """The optimizers read what the side streams have written: the current streams wait for all replicas' sums."""
        for replica, event in enumerate(live.filled):
            event.wait()
            # A copy to another device reads the sum there, where clipping writes it in place.
            if self._backends[replica] is not self._backends[live.plan.owner]:
                event.wait(self._backends[live.plan.owner].current_stream())

    def _await_readers(self, live: LiveBucket, stream: Stream) -> None:
        """A hook overwrites what the last step's sum and copies may still read."""
        for event in live.filled:
            event.wait(stream)

    def _await_users(self, contributors: Sequence[int]) -> None:
        """Sums overwrite what the optimizer of a replica that is idle now may still read of the last step.

        A contributor's arrivals come after its optimizer's step anyway.
        """
        for replica, stream in enumerate(self._side):
            if replica not in contributors:
                stream.wait_event(self._used[replica])
