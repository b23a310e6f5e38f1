"""Both sides of docs/migration.md run as printed, each section as a script of its own after the page's first block; and
what the page says of the other loaders' states and failures is still true of them.

The other loaders are in an environment of their own: `make test-interop`.
"""

import importlib.util
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
BLOCK = re.compile(r'^```python(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
MODULES = {
    "StatefulDataLoader": "torchdata.stateful_dataloader",
    "torchdata.nodes": "torchdata.nodes",
    "WebDataset": "webdataset",
    "MosaicML Streaming": "streaming",
    "LitData": "litdata",
    "DALI": "nvidia.dali",
    "SPDL": "spdl.pipeline",
    "Grain": "grain",
    "tf.data": "tensorflow",
}
"""By the title of a block: what has to be installed for it."""

# torchvision of the package index wants CUDA's libraries for its operators, and fails to import on a torch without
# them: their names are enough for what only imports it.
NAMES_OF_OPERATORS = """
import runpy, sys, torch
named = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    named.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def sections():
    """Title of the other side -> the section's program."""
    first, *others = re.split(r"^## ", PAGE, flags=re.M)
    (head,) = [code for _, code in BLOCK.findall(first)]
    for section in others:
        blocks = BLOCK.findall(section)
        titles = [title for title, _ in blocks if title]
        if titles:
            title = titles[0]
            yield title, "\n\n".join([head, *(code for _, code in blocks)])


SECTIONS = dict(sections())


def installed(module):
    package, _, _ = module.partition(".")
    try:
        return bool(importlib.util.find_spec(package) and importlib.util.find_spec(module))
    except ModuleNotFoundError:
        return False


def test_every_loader_of_the_page_has_a_side_that_runs():
    assert set(SECTIONS) == set(MODULES)


@pytest.mark.parametrize("title", MODULES)
def test_both_sides_run_as_printed(title, tmp_path):
    if not installed(MODULES[title]):
        pytest.skip(f"{title} is not installed: make test-interop installs it and runs this")
    from pipegraph.cli.demo.samples import make_files

    make_files(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(SECTIONS[title])
    wrapper = ["-c", NAMES_OF_OPERATORS] if title == "MosaicML Streaming" else []
    environment = {**os.environ, "PIPEGRAPH_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *wrapper, str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def of(title):
    return pytest.importorskip(MODULES[title], reason="make test-interop installs it and runs this")


@pytest.mark.filterwarnings("ignore")
def test_stateful_dataloaders_state_wants_the_same_num_workers():
    stateful = of("StatefulDataLoader")
    loader = stateful.StatefulDataLoader(range(64), batch_size=4, num_workers=1)
    next(iter(loader))
    state = loader.state_dict()
    for others in (0, 2):
        with pytest.raises(AssertionError):
            other = stateful.StatefulDataLoader(range(64), batch_size=4, num_workers=others)
            other.load_state_dict(state)
            next(iter(other))


def test_torchdata_nodes_out_of_order_lose_what_was_under_way():
    nodes = of("torchdata.nodes")
    late = threading.Event()

    def work(item):
        if item == 0:
            late.wait()
        return item

    def loader():
        node = nodes.IterableWrapper(range(20))
        return nodes.Loader(nodes.ParallelMapper(node, work, num_workers=2, method="thread", in_order=False))

    first = loader()
    items = iter(first)
    given = [next(items) for _ in range(5)]
    state = first.state_dict()
    late.set()
    resumed = loader()
    resumed.load_state_dict(state)
    assert 0 not in {*given, *resumed}


@pytest.mark.filterwarnings("ignore")
def test_litdata_leaves_blocks_out_after_a_resume_with_more_workers(tmp_path):
    """And its blocks lie side by side: token 128 is the last of one and no input of the next."""
    litdata = of("LitData")
    folder = str(tmp_path / "optimized")
    tokens = litdata.TokensLoader()
    litdata.optimize(
        one_array, [65_536], folder, chunk_bytes="1MB", num_workers=1, item_loader=tokens, start_method="fork"
    )

    def loader(workers):
        blocks = litdata.TokensLoader(block_size=129)
        dataset = litdata.StreamingDataset(folder, item_loader=blocks, shuffle=True, drop_last=True)
        return litdata.StreamingDataLoader(dataset, batch_size=4, num_workers=workers)

    def firsts(batches):
        return {int(row[0]) for batch in batches for row in batch}

    whole = firsts(loader(2))
    assert all(first % 129 == 0 for first in whole)
    stopped = loader(2)
    given = firsts(batch for batch, _ in zip(stopped, range(5), strict=False))
    state = stopped.state_dict()
    resumed = loader(3)
    resumed.load_state_dict(state)
    assert whole - given - firsts(resumed)


def one_array(length):
    yield torch.arange(length)


def test_a_bad_image_ends_a_dali_pipeline(tmp_path):
    dali = of("DALI")
    (tmp_path / "class").mkdir()
    for number in range(4):
        (tmp_path / "class" / f"{number}.jpg").write_bytes(b"no image")

    @dali.pipeline_def(batch_size=2, num_threads=1, device_id=None)
    def pipeline():
        jpegs, _ = dali.fn.readers.file(file_root=str(tmp_path))
        return dali.fn.decoders.image(jpegs, device="cpu")

    running = pipeline()
    running.build()
    with pytest.raises(RuntimeError):
        running.run()
    with pytest.raises(RuntimeError):
        running.run()


def test_grains_elastic_iterator_refuses_filters():
    grain = of("Grain")
    from grain import experimental, python

    dataset = grain.MapDataset.range(64).filter(lambda item: item % 2 == 0)
    with pytest.raises(ValueError, match="filter"):
        experimental.ElasticIterator(dataset, 8, python.ShardOptions(shard_index=0, shard_count=1))
