"""One persistent thread per replica, and the plain parallel apply."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from pipegraph import concurrency
from pipegraph.device import backend_for, bind_thread, normalised
from pipegraph.device.split import leaves
from pipegraph.device.threads import start_thread
from pipegraph.errors import note
from pipegraph.replicas.caller import CallerState

Job = Callable[[], Any]
_Order = tuple[Job, "concurrency.Future[Any]"]


def _serve(orders: concurrency.SimpleQueue[_Order | None], device: torch.device | None = None) -> None:
    if device is not None:
        bind_thread(device)
    while (order := orders.get()) is not None:
        job, done = order
        try:
            result = job()
        except BaseException as error:
            done.set_exception(error)
            del error
        else:
            done.set_result(result)
            del result
        # An idle thread holds no tensors.
        del order, job, done


class ReplicaThreads:
    """One thread per replica, started once; ended by :meth:`close` or when the object is collected.

    Args:
        names: what failures are to be noted with, one per member: ``"replica 0 on cpu#0"``.
        intra_op: the width of each thread's tensor operations.
        devices: each thread's own, to be made its current one; None where there is none.
    """

    def __init__(self, names: Sequence[str], intra_op: int, devices: Sequence[torch.device | None]) -> None:
        self._names = tuple(names)
        self._orders: list[concurrency.SimpleQueue[_Order | None]] = [
            concurrency.SimpleQueue() for _ in names
        ]
        self._threads = [
            # They know the queue, not its owner, so that this can be collected.
            start_thread(partial(_serve, orders, device), f"pipegraph-replica-{index}", intra_op)
            for index, (orders, device) in enumerate(zip(self._orders, devices, strict=True))
        ]
        self._end = weakref.finalize(self, _end, self._orders)

    def run(self, jobs: Mapping[int, Job]) -> dict[int, Any]:
        """Run jobs at the same time, each in its member's thread, and wait for all.

        Raises:
            The failure of the lowest failing member, with its own type and
            traceback and a note that names the member. A KeyboardInterrupt of the waiting thread is
            raised once all jobs have ended, a second one at once, as :class:`Abandoned`.
        """
        futures: dict[int, concurrency.Future[Any]] = {}
        try:
            for member, job in jobs.items():
                future: concurrency.Future[Any] = concurrency.Future()
                self._orders[member].put((job, future))
                futures[member] = future
            concurrency.wait(list(futures.values()))
        except KeyboardInterrupt:
            _wait_once_more(futures)
            raise
        for member in sorted(futures):
            failure = futures[member].exception()
            if failure is not None:
                note_once(failure, f"in {self._names[member]}")
                raise failure
        return {member: future.result() for member, future in futures.items()}

    @property
    def members(self) -> tuple[concurrency.Thread, ...]:
        return tuple(self._threads)

    def close(self, join: bool = True) -> None:
        """End the threads; with ``join=False`` without waiting for jobs that still run."""
        self._end()
        if join:
            for thread in self._threads:
                thread.join()


def _end(orders: Sequence[concurrency.SimpleQueue[_Order | None]]) -> None:
    for line in orders:
        line.put(None)


class Abandoned(KeyboardInterrupt):
    """Interrupted a second time while jobs still ran: their replicas' state is unknown."""


def _wait_once_more(futures: Mapping[int, concurrency.Future[Any]]) -> None:
    """After an interrupt: until all jobs have ended, so that nothing runs on behind the exception."""
    try:
        concurrency.wait(list(futures.values()))
    except KeyboardInterrupt:
        raise Abandoned("interrupted twice while replicas still ran") from None


def note_once(failure: BaseException, text: str) -> None:
    """Add a note unless it is there: the same exception object may come out of several waits."""
    if text not in getattr(failure, "__notes__", ()):
        note(failure, text)


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
    """Call ``modules[i](*inputs[i], **kwargs[i])`` at the same time, one thread each, and return the outputs.

    Every thread sees the caller's grad and inference mode, autocast, default device and context variables. An
    input that is no tuple is the only argument. One module runs in the calling thread.

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
    state = CallerState.capture(frozenset(place.type for place in places))
    # A backend without streams of its own starts nothing; it knows the caller's current stream.
    backends = {place: backend_for(place) for place in places}
    streams = {place: backend.current_stream() for place, backend in backends.items()}

    def call(index: int) -> Any:
        with backends[places[index]].use(streams[places[index]]):
            return modules[index](*arguments[index], **given[index])

    if count == 1:
        try:
            return [modules[0](*arguments[0], **given[0])]
        except BaseException as failure:
            note_once(failure, f"in {names[0]}")
            raise
    threads = ReplicaThreads(names, max(1, torch.get_num_threads() // max(1, count)), [None] * count)
    all_ended = True
    try:
        return list(threads.run({i: partial(state.run, partial(call, i)) for i in range(count)}).values())
    except Abandoned:
        all_ended = False
        raise
    finally:
        threads.close(join=all_ended)
