"""Every accelerator of torch takes the same lines: what it offers is asked, and what it lacks is made up for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_device import offer

import pipegraph as pg
from pipegraph import operators as ops
from pipegraph.cli import doctor
from pipegraph.components import Context
from pipegraph.device import accelerator as module
from pipegraph.device.backend import Slot, slots_on
from pipegraph.device.opening import backend_for, every_device, profiler_ranges
from pipegraph.device.present import current_device, is_initialized
from pipegraph.device.slabs import pinned
from pipegraph.errors import DeviceError, GraphError
from pipegraph.operators.batch_slabs import StageSlabs
from pipegraph.replicas.replica_threads import no_autocast
from pipegraph.replicas.runner import forked_seed

ROWS, WIDTH = 4, 512
STEPS = 40


def batch_of(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((ROWS, WIDTH), float(number)), "label": torch.full((ROWS,), number)}


def numbers(count: int = STEPS) -> pg.Node:
    node = pg.Graph("numbers").add(ops.FromSequence(list(range(count)))).then(ops.Batch(1))
    return node.then(lambda batch: batch_of(int(batch[0])))


def wrong(delivered: list[tuple[int, torch.Tensor]]) -> int:
    """Batches that hold other numbers than their own; read by the host, which waits for the device."""
    return sum(bool((values.cpu() != number).any()) for number, values in delivered)


def arrived(node: pg.Node) -> int:
    found = []
    with node.graph.loader(node) as loader:
        for number, batch in enumerate(loader):
            found += [(number, batch["x"][0, :8].clone()), (number, batch["label"].clone())]
            del batch
        assert len(found) == 2 * STEPS
    return wrong(found)


# -- names ---------------------------------------------------------------------------------------


def test_the_accelerator_that_is_there_has_a_name_of_its_own(accelerator: torch.device) -> None:
    copy = ops.CopyToDevice("accelerator")
    assert copy.device == accelerator
    assert ops.Scatter(["accelerator:0", accelerator]).devices == (accelerator, accelerator)
    assert every_device()[0] == accelerator
    assert arrived(numbers().then(copy, capacity=2)) == 0


def test_without_an_accelerator_its_name_is_refused() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(GraphError, match=r"CopyToDevice: 'accelerator': torch finds no accelerator.*'cpu'"):
        ops.CopyToDevice("accelerator")
    assert every_device() == [torch.device("cpu")]


def test_a_device_beyond_the_last_is_refused_with_those_that_are_there(simulated: torch.device) -> None:
    with pytest.raises(DeviceError, match="'simulated:9' is not on this machine, which offers simulated:0"):
        backend_for("simulated:9")


def test_replicas_are_on_all_devices_of_the_accelerator_by_default(simulated: torch.device) -> None:
    with pg.ReplicaExecutor(torch.nn.Linear(2, 2).to(simulated)) as executor:
        assert [slot.device for slot in executor._runner.slots] == every_device()
        assert len(every_device()) == torch.accelerator.device_count() > 1


# -- pinned batches that leave the graph ------------------------------------------------------------


def sent_by_the_loop(node: pg.Node, device: torch.device) -> int:
    """As everybody writes it: the loop sends the batch itself, and keeps nothing of it in host memory."""
    found = []
    with node.graph.loader(node) as loader:
        for number, batch in enumerate(loader):
            assert batch["x"].is_pinned() and batch["label"].is_pinned()
            found += [(number, tensor.to(device, non_blocking=True)) for tensor in batch.values()]
            del batch
    return wrong(found)


def test_a_loop_that_sends_a_pinned_batch_itself_sends_its_bytes(accelerator: torch.device) -> None:
    node = numbers().then(ops.Pin(), capacity=2)
    assert "each tensor is pinned by itself" in str(node.graph.plan())
    assert sent_by_the_loop(node, accelerator) == 0


def test_slabs_that_a_loop_sends_itself_are_written_too_early(
    simulated: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = ops.Pin.open

    def in_slabs(self: ops.Pin, context: Context) -> None:
        context.memory = "pinned"
        opened(self, context)

    monkeypatch.setattr(ops.Pin, "open", in_slabs)
    assert sent_by_the_loop(numbers().then(ops.Pin(), capacity=2), simulated) > 0


def test_a_step_of_replicas_reads_the_bytes_of_its_pinned_batch(accelerator: torch.device) -> None:
    class Copies(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, part: dict[str, torch.Tensor]) -> torch.Tensor:
            return part["x"][:, :8].clone() + self.weight

    node = numbers().then(ops.Pin(), capacity=2)
    found = []
    with (
        pg.ReplicaExecutor(
            Copies().to(accelerator), [accelerator] * 2, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)
        ) as executor,
        node.graph.loader() as loader,
    ):
        for number, batch in enumerate(loader):
            made = executor.step(batch, lambda outputs, part: outputs.sum(), reduction="sum", outputs=True)
            found += [(number, output) for output in made.outputs]
            del batch
        assert wrong(found) == 0


def test_a_stage_whose_slabs_leave_the_graph_gets_memory_of_torchs_own(accelerator: torch.device) -> None:
    stage = StageSlabs(Context("fill", memory="delivered", device=accelerator))
    first = stage.take(4096, None)
    made, _ = stage.deliver(first, torch.uint8, (4096,))
    assert made.is_pinned() and made.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    del first, made
    assert not stage._ring._loans._lent


# -- copies beside the slabs --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_subclasses_may_be_dropped_while_a_late_stream_reads_them(accelerator: torch.device) -> None:
    class Marked(torch.Tensor):
        pass

    node = (
        numbers()
        .then(lambda batch: {"x": batch["x"].as_subclass(Marked)})
        .then(ops.CopyToDevice(accelerator))
    )
    found = []
    with torch.Stream(accelerator), node.graph.loader(node) as loader:
        for number, batch in enumerate(loader):
            found.append((number, torch.Tensor.clone(batch["x"].as_subclass(torch.Tensor)[0, :8])))
            del batch
        assert wrong(found) == 0


@pytest.mark.filterwarnings("ignore:Sparse CS", "ignore:The PyTorch API of nested tensors")
def test_layouts_that_a_device_does_not_have_are_refused_by_name(simulated: torch.device) -> None:
    def copied(tensor: torch.Tensor) -> torch.Tensor:
        node = pg.Graph().add(ops.FromIterable([tensor])).then(ops.CopyToDevice(simulated))
        with node.graph.loader() as loader:
            (found,) = loader
        assert isinstance(found, torch.Tensor)
        return found

    rows = [torch.ones(1), torch.ones(2)]
    jagged = copied(torch.nested.nested_tensor(rows, layout=torch.jagged))
    assert jagged.values().cpu().tolist() == [1.0] * 3
    eye = torch.eye(4)
    assert torch.equal(copied(eye.to_sparse()).to_dense().cpu(), eye)
    for odd, name in (
        (eye.to_sparse_csr(), "torch.sparse_csr"),
        (torch.nested.nested_tensor(rows), "nested"),
    ):
        with pytest.raises(
            DeviceError, match=f"torch has no {name} tensors on simulated:0: copy its dense parts"
        ):
            copied(odd)


@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_the_memory_of_odd_tensors_is_found() -> None:
    from pipegraph.device.copy import components

    eye = torch.eye(3)
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    assert len(components(eye.to_sparse())) == 2
    assert len(components(eye.to_sparse_csr())) == len(components(eye.to_sparse_csc())) == 3
    assert any(part.data_ptr() == jagged.values().data_ptr() for part in components(jagged))
    assert components(eye) == [eye]


# -- devices that offer less ------------------------------------------------------------------------


LESS: dict[str, tuple[dict[str, Any], str]] = {
    "no events": ({"events": False}, "every copy is waited for"),
    "one stream": ({"streams": False}, "one stream only"),
    "unified memory": ({"streams": False, "pinned": False, "missing": {"aten::set_"}}, "one stream only"),
    "nothing pinned": ({"pinned": False}, ""),
}


@pytest.mark.parametrize("less", LESS)
def test_what_a_device_lacks_is_said_and_made_up_for(simulated: torch.device, less: str) -> None:
    offered, said = LESS[less]
    offer(**offered)
    node = numbers().then(ops.Pin()).then(ops.CopyToDevice(simulated), capacity=2)
    plan = str(node.graph.plan())
    assert said in plan
    assert ("pin: left out: torch pins no memory for simulated" in plan) == (not offered.get("pinned", True))
    assert arrived(node) == 0
    scattered = numbers().then(ops.Scatter([simulated, simulated]), capacity=2)
    parts = []
    with scattered.graph.loader(scattered) as loader:
        for number, batch in enumerate(loader):
            parts += [(number, batch.wait(place)["x"][0, :8].clone()) for place in range(2)]
            del batch
    assert wrong(parts) == 0


def test_memory_that_is_the_hosts_own_has_nothing_to_pin(
    simulated: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module._KNOWN, simulated.type, module._KNOWN["mps"])
    assert "simulated works in the host's own memory, so there is nothing to pin" in str(module.unpinned())
    assert arrived(numbers().then(ops.Pin()).then(ops.CopyToDevice(simulated), capacity=2)) == 0


def test_a_device_is_asked_what_it_offers(accelerator: torch.device) -> None:
    module._probed.cache_clear()
    found = module.offers(accelerator)
    assert found.streams and found.events and found.pinned
    assert found.lacking is None


# -- current devices and modes ----------------------------------------------------------------------


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_memory_is_pinned_for_the_device_that_reads_it(
    simulated: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: set[int] = set()
    empty = torch.empty

    def noting(*args: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            there.add(torch.accelerator.current_device_index())
        return empty(*args, **options)

    module.unpinned()
    module.offers(torch.device("simulated:1"))  # asked on those devices
    monkeypatch.setattr(torch, "empty", noting)
    second = torch.device("simulated:1")
    in_a_thread(lambda: pinned(64, second))
    node = numbers().then(ops.Pin()).then(ops.CopyToDevice(second))
    assert arrived(node) == 0
    assert arrived(numbers().then(ops.CopyToDevice(second))) == 0
    assert there == {1}


def test_a_pin_at_the_end_pins_for_the_trainers_own_device(
    simulated: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: set[int] = set()
    pin = torch.Tensor.pin_memory

    def noting(tensor: torch.Tensor) -> torch.Tensor:
        there.add(torch.accelerator.current_device_index())
        return pin(tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", noting)
    node = numbers(4).then(ops.Pin())
    with torch.accelerator.device_index(2), node.graph.loader(node) as loader:
        list(loader)
        assert all(
            batch.is_pinned()
            for batch in pg.DataLoader(torch.arange(8), 4, num_workers=1, workers="thread", pin_memory=True)
        )
    assert there == {2}


def test_threads_may_use_one_stream_at_the_same_time(accelerator: torch.device) -> None:
    with backend_for(accelerator) as backend:
        stream = backend.stream(Slot(accelerator), "shared")
        both = threading.Barrier(2)

        def work() -> bool:
            with backend.use(stream), backend.use(stream):
                both.wait(60)
                return backend.current_stream() == stream

        other: list[bool] = []
        thread = threading.Thread(target=lambda: other.append(work()))
        thread.start()
        assert work()
        thread.join()
        assert other == [True]
        assert backend.current_stream() != stream


def test_autocast_of_the_accelerator_is_left_too(accelerator: torch.device) -> None:
    with torch.autocast(accelerator.type, dtype=torch.bfloat16):
        with no_autocast():
            assert not torch.is_autocast_enabled(accelerator.type)
        assert torch.is_autocast_enabled(accelerator.type)


def test_doctor_lists_what_each_accelerator_offers(accelerator: torch.device) -> None:
    rows = dict(doctor._devices())
    assert rows["devices"].endswith(f"x {accelerator.type}, and cpu")
    assert "copies on a stream of their own; pinned memory" in rows[str(accelerator)]


def test_a_batch_is_scattered_over_the_accelerator_and_the_cpu(accelerator: torch.device) -> None:
    node = numbers().then(ops.Scatter([accelerator, "cpu"]), capacity=2)
    found = []
    with node.graph.loader() as loader:
        for number, batch in enumerate(loader):
            assert batch.devices == (accelerator, torch.device("cpu"))
            found += [(number, batch.wait(place)["x"][:, :8].clone()) for place in range(2)]
            del batch
    assert {len(rows) for _, rows in found} == {ROWS // 2} and wrong(found) == 0


def test_streams_are_of_their_backends_device_and_end_with_it(accelerator: torch.device) -> None:
    backend = backend_for(accelerator)
    with pytest.raises(DeviceError, match=f"the backend of {accelerator} has no stream for slot cpu#0"):
        backend.stream(Slot(torch.device("cpu")), "wrong")
    backend.close()
    with pytest.raises(DeviceError, match=f"the backend of {accelerator} is closed"):
        backend.stream(Slot(accelerator), "late")
    with (
        backend_for("cpu") as other,
        pytest.raises(DeviceError, match="a device's events are awaited on its"),
    ):
        event = backend.current_stream().record_event()
        event.wait(other.current_stream())


def test_deterministic_replicas_leave_the_generators_of_other_devices_alone(simulated: torch.device) -> None:
    with backend_for("simulated:0") as mine, backend_for("simulated:1") as other:
        states = [torch.get_rng_state(), mine.random_state(), other.random_state()]
        with forked_seed(5, [mine]):
            seeded = mine.random_state()
            assert not torch.equal(seeded, states[1]) and not torch.equal(torch.get_rng_state(), states[0])
            assert torch.equal(other.random_state(), states[2])
        found = [torch.get_rng_state(), mine.random_state(), other.random_state()]
        assert all(map(torch.equal, states, found))
        with forked_seed(5, [mine]):
            assert torch.equal(mine.random_state(), seeded)


def test_asking_for_the_current_device_begins_to_use_none(
    simulated: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.get_device_module(simulated), "is_initialized", lambda: False)
    monkeypatch.delattr(torch.accelerator, "current_device_index")
    assert current_device() == torch.device("simulated:0")


def test_what_only_a_vendor_has_is_left_out_elsewhere(simulated: torch.device) -> None:
    assert is_initialized()
    with profiler_ranges()("a stage"):
        assert [slot.device for slot in slots_on([1, "simulated"])] == [
            torch.device("simulated:1"),
            simulated,
        ]
