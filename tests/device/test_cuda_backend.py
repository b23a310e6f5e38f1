"""The CUDA backend; runs where there is a CUDA device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pipegraph.device import accelerator
from pipegraph.device.accelerator import backend_for
from pipegraph.device.backend import Slot, slots_on
from pipegraph.device.copy import copy_tree
from pipegraph.device.slabs import pinned
from pipegraph.errors import DeviceError

pytestmark = pytest.mark.cuda
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_gpu_is_a_clear_error() -> None:
    with pytest.raises(DeviceError, match="'cuda:0' is not on this machine, which has no accelerator"):
        backend_for("cuda")


def test_one_thread_at_a_time_gives_work_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    monkeypatch.setattr(
        torch.cuda.nccl, "all_reduce", lambda *given, **options: held.append(accelerator._NCCL.locked())
    )
    accelerator.CudaBackend.sum_together(object.__new__(accelerator.CudaBackend), [torch.ones(2)], [])
    assert held == [True] and not accelerator._NCCL.locked()


@needs_cuda
def test_a_pinned_batch_is_copied_on_a_side_stream() -> None:
    with backend_for("cuda") as backend:
        stream = backend.stream(Slot(torch.device("cuda:0")), "copy")
        host = {"x": pinned(4096, backend.device).fill_(7), "key": ["a"]}
        batch, ready = copy_tree(host, backend, stream)
        ready.wait()
        assert batch["x"].device == torch.device("cuda:0")
        assert int(batch["x"].sum(dtype=torch.int64)) == 7 * 4096
        ready.synchronize()
        assert ready.query()


@needs_cuda
def test_two_slots_of_one_gpu_have_streams_of_their_own() -> None:
    with backend_for("cuda") as backend:
        first, second = (backend.stream(slot, str(slot)) for slot in slots_on(["cuda", "cuda"]))
        x = torch.zeros(1024, device="cuda")
        written = backend.event()
        second.wait_event(backend.current_stream().record_event())
        first.wait_event(backend.current_stream().record_event())
        first.run(lambda: x.add_(1))
        first.record_event(written)
        second.wait_event(written)
        second.run(lambda: x.mul_(3))
        second.record_event().wait()
        assert x.mean().item() == 3.0


@needs_cuda
def test_the_current_stream_can_be_chosen() -> None:
    with backend_for("cuda") as backend:
        stream = backend.stream(Slot(torch.device("cuda:0")), "own")
        with backend.use(stream):
            assert backend.current_stream().raw == stream.raw  # type: ignore[attr-defined]
        assert backend.current_stream().raw != stream.raw  # type: ignore[attr-defined]


SECOND = """
import torch
import pipegraph as pg
from pipegraph import operators as ops
graph = pg.Graph("second")
graph.add(ops.FromIterable(range(64))).then(ops.Batch(8)).then(ops.CopyToDevice("cuda:1"))
with graph.loader() as loader:
    assert [batch.device.index for batch in loader] == [1] * 8
assert not torch._C._cuda_hasPrimaryContext(0), "a context on device 0"
"""


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)
def test_a_copy_to_the_second_gpu_makes_no_context_on_the_first() -> None:
    done = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
