"""What the forge reads: workflows call make's targets, and versions agree with pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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


def test_ruff_has_one_version():
    (version,) = re.findall(r"'ruff==([\d.]+)'", str(PROJECT["optional-dependencies"]["lint"]))
    for name in (".pre-commit-config.yaml", "docs/requirements.txt"):
        assert set(re.findall(r"ruff==([\d.]+)", (ROOT / name).read_text())) == {version}, name


def test_the_citation_is_of_this_version():
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_no_page_names_an_address_of_the_project_before_there_is_one():
    """Whoever builds the site gives it; an invented one could be registered by others."""
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob(".github/**/*.*"),
        ROOT / "CITATION.cff",
    ]
    found = [
        f"{page.name}: {address}"
        for page in [*pages, ROOT / "mkdocs.yml", ROOT / "pyproject.toml"]
        for address in re.findall(r"https?://[^\s)\"'>`]+", page.read_text())
        if re.search(r"pipegraph(?!-torch-)", address)
    ]
    assert not found


def test_the_site_takes_its_addresses_from_whoever_builds_it():
    site = (ROOT / "mkdocs.yml").read_text()
    assert (
        'repo_url: !ENV [PIPEGRAPH_REPOSITORY, ""]' in site and 'site_url: !ENV [PIPEGRAPH_SITE, ""]' in site
    )
