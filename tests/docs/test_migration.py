"""Both sides of docs/migration.md run as printed, each section as a script of its own after the page's first block; and
what the page says of the other loaders' states and failures is still true of them.

The other loaders are in an environment of their own: `make test-interop`.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    from pipegraph.cli.demo import make_files

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
