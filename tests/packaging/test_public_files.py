"""What the forge reads: workflows call make's targets, and versions agree with pyproject.toml."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_make_runs(workflow):
    called = re.findall(r"\bmake ([a-z-]+)", workflow.read_text())
    assert called
    for target in called:
        assert re.search(rf"^{target}:", MAKEFILE, re.M), target


def test_every_target_is_phony_and_described():
    phony = set(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.M)[0].split())
    targets = set(re.findall(r"^([a-z-]+):(?!=)", MAKEFILE, re.M))
    assert targets == phony
    described = set(re.findall(r"^#   make ([a-z-]+)", MAKEFILE, re.M)) | set(
        re.findall(r"; make ([a-z-]+)", MAKEFILE)
    )
    assert targets - {"help"} <= described
