"""What is installed is what is here: packages, wheel, sdist, install lines, imports at first use."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OPTIONAL = (
    "cv2", "PIL", "simplejpeg", "nvidia", "obstore", "pyarrow", "zstandard", "google_crc32c", "ray", "matplotlib",
    "jinja2", "prometheus_client", "rich", "typer", "torchvision",
)  # fmt: skip


def folders():
    """Every folder with an ``__init__.py``, as the package it is."""
    for top, name in ((ROOT / "pipegraph", "pipegraph"), (ROOT / "operators", "pipegraph.operators")):
        for init in top.rglob("__init__.py"):
            inside = init.parent.relative_to(top).parts
            if name == "pipegraph" and inside[:1] == ("operators",):
                continue
            yield ".".join((name, *inside))


def python(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, **options
    )


def test_the_list_of_packages_equals_the_folders():
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(folders())
    places = PROJECT["tool"]["setuptools"]["package-dir"]
    for package in listed:
        if package.startswith("pipegraph.operators"):
            assert places[package] == package.removeprefix("pipegraph.").replace(".", "/")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist, the wheel made from the sdist as an index's users get it; from a copy without builds."""
    place = tmp_path_factory.mktemp("build")
    source = place / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for name in ("pipegraph", "operators"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place / "dist"), str(source)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (place / "dist").glob("*.whl")
    (sdist,) = (place / "dist").glob("*.tar.gz")
    return wheel, sdist


def modules():
    return sorted(
        f"{package.replace('.', '/')}/{path.name}"
        for package in folders()
        for path in (
            ROOT / (package.replace(".", "/").replace("pipegraph/operators", "operators"))
        ).glob("*.py")
    )  # fmt: skip


def test_the_distribution_has_a_name_of_its_own_in_every_file_and_install_line(built):
    """``pipegraph`` on the package index is another project, and the distribution's name is nobody's yet there: a line
    with either would install a stranger's."""
    wheel, sdist = (path.name for path in built)
    assert wheel.startswith("pipegraph_torch-") and sdist.startswith("pipegraph_torch-")
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    for folder in ("pipegraph", "operators", "docs", "benchmarks", "examples"):
        pages += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".txt")]
    wrong = re.compile(
        r"\bpipegraph\[|install (-\w+ )*[\"']?pipegraph(-torch)?\b|version\([\"']pipegraph[\"']\)"
    )
    found = [
        f"{path}: {line}" for path in pages for line in path.read_text().splitlines() if wrong.search(line)
    ]
    assert not found, found


def test_every_dependency_is_on_the_page():
    project = PROJECT["project"]
    groups = {"core": project["dependencies"], **project["optional-dependencies"]}
    named = {re.match(r"[\w.-]+", line)[0].lower() for group in groups.values() for line in group}
    page = (ROOT / "docs" / "dependencies.md").read_text().lower()
    missing = [name for name in named - {project["name"]} if not re.search(rf"\b{name}\b", page)]
    assert not missing, missing


def test_the_wheel_is_of_every_python_and_holds_the_compiled_part_where_there_is_a_compiler(built):
    assert "-py3-none-" in built[0].name
    names = zipfile.ZipFile(built[0]).namelist()
    assert any("/_rows." in name for name in names) == (shutil.which("cc") is not None)


def test_importing_pipegraph_imports_no_optional_part_and_starts_nothing():
    program = (
        "import torch, threading, sys, json\nalready = set(sys.modules)\nimport pipegraph\n"
        "light = sorted({name.partition('.')[0] for name in set(sys.modules) - already})\n"
        "operators = pipegraph.operators\n"
        "early = [name for name in sys.modules if name.startswith('pipegraph.operators.')]\n"
        "[getattr(operators, name) for name in operators.__all__]\n"
        "pipegraph.ReplicaExecutor, pipegraph.NodeCache\n"
        "import pipegraph.testing, pipegraph.operators.images\n"
        "print(json.dumps([light, early, threading.active_count()]))"
    )
    done = python("-X", "importtime", "-c", program)
    assert done.returncode == 0, done.stderr
    light, early, threads = json.loads(done.stdout)
    assert early == []  # an operator is imported when it is first used
    assert set(light) - set(sys.stdlib_module_names) <= {"pipegraph", "numpy"}, light
    assert threads == 1
    # Also with everything that `import pipegraph` leaves for later.
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "pipegraph" in imported
    assert not imported & {*OPTIONAL, "pytest", "hypothesis"}, imported


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_line_without_its_extra_gives_its_install_line(missing, monkeypatch, capsys):
    from pipegraph.cli import main

    monkeypatch.delitem(sys.modules, "pipegraph.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["doctor"]) == 2
    assert 'not installed: pip install "rich>=' in capsys.readouterr().err


def test_install_lines_name_what_is_missing_and_not_a_package_that_an_index_may_lack(monkeypatch):
    from importlib import metadata

    from pipegraph.errors import install_line

    extras = PROJECT["project"]["optional-dependencies"]
    # What was installed may be older than pyproject.toml: the versions may differ, and nothing else.
    assert re.sub(r"[\d.]+", "", install_line("cloud")) == re.sub(
        r"[\d.]+", "", f'pip install "{extras["cloud"][0]}"'
    )
    assert re.fullmatch(r'pip install "Pillow>=[\d.]+"', install_line("images", "pillow"))

    def nothing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", nothing)  # run from its sources
    assert install_line("cloud") == 'pip install -e ".[cloud]"'
