"""Runs jobs on the threads and streams of all replicas."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipegraph.device import Slot
from pipegraph.errors import PipegraphWarning
from pipegraph.replicas.caller import CallerState
from pipegraph.replicas.replica_streams import ReplicaStreams
from pipegraph.replicas.replica_threads import Job, ReplicaThreads, note_once
from pipegraph.replicas.seeds import replica_seed


class ReplicaRunner:
    """One replica runs in the calling thread; several in a thread each, the CPU's cores dealt among them."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._streams = ReplicaStreams(slots)
        self.slots, self.backends = self._streams.slots, self._streams.backends
        self._names = [f"replica {replica} on {slot}" for replica, slot in enumerate(slots)]
        width = max(1, torch.get_num_threads() // len(slots))
        self.threads = (
            ReplicaThreads(self._names, width, [slot.device for slot in slots]) if len(slots) > 1 else None
        )
        self.reads, self.has_stream = self._streams.reads, self._streams.has_stream
        self._watched = sorted({slot.device for slot in slots if slot.index > 0}, key=str)

    def seed_devices(self, seed: int) -> None:
        """Distinct devices draw different numbers; the first keeps the caller's own state."""
        for number, (device, backend) in enumerate(self.backends.items()):
            if number > 0 and device.type != "cpu":
                backend.seed(replica_seed(seed, 0, number))

    def run(self, jobs: Mapping[int, Job], serial: bool = False) -> dict[int, Any]:
        """Run jobs under the caller's state and wait for all; `serial`: one after another.

        Raises:
            The lowest failing replica's exception, noted with the replica and its slot.
        """
        if self.threads is None:
            try:
                return {0: jobs[0]()}
            except BaseException as failure:
                note_once(failure, f"in {self._names[0]}")
                raise
        state = CallerState.capture(frozenset(device.type for device in self.backends))
        orders = {r: partial(state.run, self._streams.bound(r, job)) for r, job in jobs.items()}
        results: dict[int, Any] = {}
        for chosen in [{replica: order} for replica, order in orders.items()] if serial else [orders]:
            results.update(self.threads.run(chosen))
        self._streams.join(list(results))
        return results

    def run_watched(self, jobs: Mapping[int, Job], serial: bool = False) -> dict[int, Any]:
        """The same for forwards: warns, once, when replicas have drawn from a generator that they share."""
        watched = self._watched if len(jobs) > 1 else []
        before = [self.backends[device].random_state() for device in watched]
        results = self.run(jobs, serial)
        after = [self.backends[device].random_state() for device in watched]
        if not all(map(torch.equal, before, after)):
            self.stop_watching()
            warnings.warn(
                "replicas that share a device draw random numbers from one generator: valid, but not "
                "reproducible, and unsuited to activation checkpointing; deterministic=True is exact",
                PipegraphWarning,
                stacklevel=4,
            )
        return results

    def stop_watching(self) -> None:
        self._watched = []

    def close(self, join: bool = True) -> None:
        """End threads and streams; with ``join=False`` without waiting for what still runs."""
        if self.threads is not None:
            self.threads.close(join)
        if join:
            self._streams.close()
