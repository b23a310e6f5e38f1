"""Runs jobs on the threads and streams of all replicas; the plain parallel apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn import Module

from pipegraph.device.accelerator import backend_for
from pipegraph.device.backend import Backend, Slot, Stream, normalised
from pipegraph.device.copy import tensors_within
from pipegraph.device.slabs import on_device
from pipegraph.device.split import leaves
from pipegraph.replicas.replica_threads import (
    CallerState,
    Job,
    ReplicaThreads,
    lines_of,
    note_once,
)
from pipegraph.stopping import Closing

T = TypeVar("T")


class ReplicaRunner(Closing):
    """One replica runs in the calling thread. Several run in threads: on the CPU one each, among which its cores are
    dealt, and one for each accelerator, which is given the work of its replicas in turn.

    The first slot of a device works on the caller's own current stream there, so one slot per device needs no events
    at all. Further slots of an accelerator have streams of their own, where its allocator can be notified of what these
    read; they are tied to the caller's streams at the edges of each phase. On the CPU every thread is its own stream.
    """

    def __init__(self, slots: Sequence[Slot], names: Sequence[str] | None = None) -> None:
        self.slots = tuple(slots)
        self.backends = {device: backend_for(device) for device in dict.fromkeys(s.device for s in slots)}
        self._own: list[Stream | None] = [
            self.backends[slot.device].stream(slot, f"replica-{slot.index}")
            if slot.index > 0 and slot.device.type != "cpu"
            else None
            for slot in slots
        ]
        self._names = names or [f"replica {replica} on {slot}" for replica, slot in enumerate(slots)]
        width = max(1, torch.get_num_threads() // max(1, len(slots)))
        self.threads = ReplicaThreads(width, [slot.device for slot in slots]) if len(slots) != 1 else None

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
            return {0: _noted(jobs[0], self._names[0])}
        state = CallerState.capture(frozenset(device.type for device in self.backends))
        bound = {r: partial(state.run, self._bound(r, job)) for r, job in jobs.items()}
        orders = {r: partial(_noted, job, self._names[r]) for r, job in bound.items()}
        results: dict[int, Any] = {}
        for chosen in [{replica: order} for replica, order in orders.items()] if serial else [orders]:
            results.update(self.threads.run(chosen))
        for replica in results:  # what the caller's streams are given next comes after it
            stream = self._own[replica]
            if stream is not None:
                stream.record_event().wait(self.backends[self.slots[replica].device].current_stream())
        return results

    def _bound(self, replica: int, work: Callable[[], T]) -> Callable[[], T]:
        """`work` for another thread, on the replica's stream, after what the caller's streams hold now."""
        slot = self.slots[replica]
        if slot.device.type == "cpu":
            return work
        backend = self.backends[slot.device]
        callers = backend.current_stream()
        stream = self._own[replica]
        if stream is not None:
            stream.wait_event(callers.record_event())

        def run() -> T:
            with backend.use(stream or callers):
                return work()

        return run

    def reads(self, replica: int, held: Any) -> None:
        """A replica's stream reads the caller's tensors: freed in a backward, they are not given away before."""
        if (stream := self._own[replica]) is not None:
            backend = self.backends[self.slots[replica].device]
            for tensor in tensors_within(held, backend.device):
                backend.read_on(tensor, stream)

    def close(self) -> None:
        """End threads and streams, once what still runs has ended."""
        if self.threads is not None:
            self.threads.close()
        for backend in self.backends.values():
            backend.close()


def _noted(job: Job, name: str) -> Any:
    """What a job returns; what it raises is noted with its replica's name."""
    try:
        return job()
    except BaseException as failure:
        note_once(failure, f"in {name}")
        raise


def replica_seed(seed: int, call: int, replica: int) -> int:
    """The seed of a replica in the executor's `call`-th call (counted from 0), for ``deterministic=True``.

    numpy's ``SeedSequence`` over the three numbers, so that neighbours are unrelated.
    """
    words = np.random.SeedSequence([seed & (2**64 - 1), call, replica]).generate_state(2, np.uint32)
    return int(words[0]) << 31 ^ int(words[1])


@contextmanager
def forked_seed(seed: int, backends: Iterable[Backend]) -> Iterator[None]:
    """The generators of the CPU and these devices are seeded inside, and as before when it ends. One thread at a time.

    ``torch.manual_seed`` would seed the devices of others, too.
    """
    before = [(backend, backend.random_state()) for backend in backends]
    with torch.random.fork_rng(devices=[]):
        try:
            torch.default_generator.manual_seed(seed)
            for backend, _ in before:
                backend.seed(seed)
            yield
        finally:
            for backend, state in before:
                backend.set_random_state(state)


def _place_of(module: Any, arguments: tuple[Any, ...]) -> torch.device:
    """The device of a module's parameters, else of its first tensor input, else the CPU."""
    owned = module.parameters() if isinstance(module, Module) else iter(())
    tensors = [leaf for _, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)]
    first = next(owned, tensors[0] if tensors else None)
    return torch.device("cpu") if first is None else first.device


def parallel_apply(
    modules: Sequence[Module | Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[torch.device | str | int] | None = None,
) -> list[Any]:
    """Call ``modules[i](*inputs[i], **kwargs[i])`` at the same time and return the outputs.

    Modules on the CPU have a thread each, and so has each accelerator, which is given the work of its modules in turn.
    Every thread sees the caller's grad and inference mode, autocast, default device and context variables. One module,
    and those of one accelerator, run in the calling thread. An input that is no tuple is the only argument.

    Raises:
        ValueError: the sequences differ in length.
        The first failing module's exception, with its own type and traceback
        and a note that says which replica on which device.
    """
    count = len(modules)
    given = [{}] * count if kwargs is None else list(kwargs)
    if len(inputs) != count or len(given) != count or (devices is not None and len(devices) != count):
        raise ValueError(
            f"parallel_apply: {count} modules need as many inputs, kwargs and devices, got {len(inputs)}, "
            f"{len(given)}, {count if devices is None else len(devices)}"
        )
    arguments = [entry if isinstance(entry, tuple) else (entry,) for entry in inputs]
    if devices is None:
        places = [_place_of(module, entry) for module, entry in zip(modules, arguments, strict=True)]
    else:
        places = [normalised(device) for device in devices]
    names = [f"replica {index} on {place}" for index, place in enumerate(places)]
    calls = [partial(modules[i], *arguments[i], **given[i]) for i in range(count)]
    if len(set(lines_of(places))) == 1:  # new threads would also begin with empty caches of cuDNN's
        backend_for(places[0]).close()  # refuses a device that is not there
        with on_device(places[0] if count > 1 else None):
            return [_noted(call, name) for call, name in zip(calls, names, strict=True)]
    # All are first slots: on the caller's own streams.
    with ReplicaRunner([Slot(place) for place in places], names) as runner:
        return list(runner.run(dict(enumerate(calls))).values())
