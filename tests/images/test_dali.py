"""DALI pipelines as pure functions of a batch and its generator."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
import torch

from pipegraph import operators as ops
from pipegraph.contracts import Context
from pipegraph.errors import GraphError, MissingExtraError

pytestmark = pytest.mark.matrix  # make test-all installs DALI
needs_dali = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None,
    reason="nvidia-dali-cuda130 is not installed",
)


def pipeline():
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def
    def recipe():
        encoded = fn.external_source(name="jpg", dtype=types.UINT8, ndim=1)
        images = fn.resize(fn.decoders.image_random_crop(encoded, device="cpu"), size=(32, 40))
        return images, fn.random.uniform(range=(0, 1))

    return recipe


def opened(definition, outputs=("image",)):
    operator = ops.Dali(definition, outputs)
    operator.open(Context("dali"))
    return operator._pipeline


@pytest.fixture
def runner():
    made = opened(pipeline(), ("image", "number"))
    yield made
    made.close()


@pytest.fixture
def chunk(encode, make_scene):
    return {"jpg": [encode(make_scene(60, 80, seed), "JPEG") for seed in range(4)], "label": [1, 2, 3, 4]}


def run(runner, chunk, seed=0):
    count = len(next(iter(chunk.values())))
    return runner.run(chunk, count, np.random.default_rng(seed))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@needs_dali
def test_a_chunk_becomes_tensors_by_name(runner, chunk):
    result = run(runner, chunk)
    assert list(result) == ["image", "number"]
    assert result["image"].shape == (4, 32, 40, 3)
    assert result["image"].dtype == torch.uint8
    assert result["number"].shape == (4,)
    assert len(set(result["number"].tolist())) == 4


@needs_dali
def test_the_generator_alone_decides_and_not_what_ran_before(runner, chunk):
    first = run(runner, chunk, 1)
    assert not equal(first, run(runner, chunk, 2))
    assert equal(first, run(runner, chunk, 1))


@needs_dali
def test_a_held_output_is_never_written_again(runner, chunk):
    held = [run(runner, chunk, seed)["image"] for seed in range(6)]
    kept = [image.clone() for image in held]
    for seed in range(6, 12):
        run(runner, chunk, seed)
    assert all(torch.equal(a, b) for a, b in zip(held, kept, strict=True))


@needs_dali
def test_a_batch_with_a_broken_sample_fails_and_the_next_one_is_fine(runner, chunk):
    broken = {"jpg": [*chunk["jpg"][:2], chunk["jpg"][2][:20] + bytes(200), chunk["jpg"][3]]}
    with pytest.raises(RuntimeError):
        run(runner, broken)
    assert equal(run(runner, chunk, 5), run(runner, chunk, 5))


@needs_dali
@pytest.mark.parametrize("apart", [False, True], ids=["one-array", "arrays"])
def test_a_pipeline_reads_its_inputs_where_they_lie(apart):
    """DALI does not show a fed input's address, but what is written there after feeding is what it reads."""
    from nvidia.dali import fn, pipeline_def

    @pipeline_def
    def more():
        return fn.external_source(name="x") + 1

    runner = opened(more, ("y",))
    batch = torch.zeros(4, 1000)

    def late(name, data, **options):
        feed(name, data, **options)
        batch.fill_(7)

    run(runner, {"x": torch.zeros(4, 1)})  # the pipeline is made anew for a larger batch
    feed = runner._pipeline.feed_input
    runner._pipeline.feed_input = late
    result = run(runner, {"x": list(batch) if apart else batch})
    assert torch.equal(result["y"], torch.full((4, 1000), 8.0))


@needs_dali
def test_a_pipelines_outputs_are_delivered_where_they_lie(runner, chunk, monkeypatch):
    made = []
    from pipegraph.operators import dali

    convert = dali._from_list

    def noted(result):
        made.append(torch.utils.dlpack.from_dlpack(result[0]).data_ptr())
        return convert(result)

    monkeypatch.setattr(dali, "_from_list", noted)
    result = run(runner, chunk)
    assert [result[name].data_ptr() for name in ("image", "number")] == made


@needs_dali
def test_definitions_that_cannot_be_fed_or_resumed_are_refused(tmp_path):
    from nvidia.dali import fn, pipeline_def

    @pipeline_def
    def reads():
        data, _ = fn.readers.file(file_root=str(tmp_path), files=["a"])
        return fn.decoders.image(data)

    @pipeline_def
    def nameless():
        return fn.external_source()

    with pytest.raises(
        GraphError, match=r"readers__File keeps a state of its own.*external_source\(name=FIELD\)"
    ):
        opened(reads)
    with pytest.raises(GraphError, match="give it name=FIELD"):
        opened(nameless)
    with pytest.raises(GraphError, match=r"returns 2 outputs, but outputs=\('image',\)"):
        opened(pipeline())
    with pytest.raises(GraphError, match="a @pipeline_def function is needed"):
        opened(lambda rng: rng)


def test_without_dali_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)

    def definition():
        pass

    definition._is_pipeline_def = True
    with pytest.raises(MissingExtraError, match='pip install "nvidia-dali-cuda130"'):
        opened(definition)
