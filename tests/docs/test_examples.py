"""Every Python example of the README and of docs/ runs, one document after its own beginning to its end."""

import re
import shutil
import warnings
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

from pipegraph.device.accelerator import unpinned

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
PAGES = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
TITLED = re.compile(r'^```python title="[^"]+"\n.*?^```$', re.M | re.S)
"""Another loader's side of docs/migration.md: test_migration.py runs it where that loader is installed."""


def own_text(document):
    """The document without other loaders' code; as many lines."""
    return TITLED.sub(lambda found: "\n" * found[0].count("\n"), document.read_text())


def examples(document):
    """The document's Python blocks as one program, each line at its own number."""
    text = own_text(document)
    program = [""] * (text.count("\n") + 1)
    for found in FENCE.finditer(text):
        if found[1] == "python":
            first = text.count("\n", 0, found.start(2))
            for offset, line in enumerate(found[2].splitlines()):
                program[first + offset] = line
    return "\n".join(program)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """What the examples read, as `pipegraph demo --make .` draws it."""
    from pipegraph.cli.demo import make_files

    folder = tmp_path_factory.mktemp("drawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEGRAPH_CACHE", str(folder / "cache"))
        make_files(folder / "files")
    return folder / "files"


@pytest.fixture
def data(drawn, tmp_path, monkeypatch):
    """A copy of it, in the working folder of one document's examples."""
    monkeypatch.setenv("PIPEGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(shutil.copytree(drawn, tmp_path / "work"))


WITH_EXAMPLES = [document for document in DOCUMENTS if examples(document).strip()]


QUANTITY = re.compile(r"[\d.,]*\d(?: ?(?:%|[num]?s|[kMGT]?B)(?![\w/]))?")
JUDGEMENT = re.compile(r"Stage '|Work comes in |Training sets|Passes ran|No ")
"""How the conclusion of a profile begins, which depends on the machine."""


def layout(text):
    """The lines without their numbers."""
    return [" ".join(QUANTITY.sub("#", line).split()) for line in text.splitlines()]


def shown_outputs(document):
    """Blocks of text right behind a block of Python: what that prints."""
    text = own_text(document)
    fences = list(FENCE.finditer(text))
    return [
        output[2]
        for code, output in pairwise(fences)
        if (code[1], output[1]) == ("python", "text") and not text[code.end() : output.start()].strip()
    ]


NOTHING_PINNED = {"pin left out", "decode: slabs_made #, slab_bytes #, bytes_written #"}
"""The lines of the README's profile that are printed where no accelerator is: elsewhere Pin runs, and the slabs before
it are pinned ones of torch's own, which are not counted."""


def outdated(document, printed):
    """The lines that the document says are printed, and that are not."""
    there = layout(printed)
    found = []
    for shown in shown_outputs(document):
        lines = list(takewhile(lambda line: not JUDGEMENT.match(line), layout(shown)))
        while lines:
            line = lines.pop(0)
            if lines and f"{line} {lines[0]}" in there:  # a page has narrower lines
                lines.pop(0)
            elif line not in there:
                found.append(line)
    return found


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=lambda path: path.name)
def test_the_examples_run_and_print_what_is_shown(document, data, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    if document.stem == "ray":
        pytest.importorskip("ray", reason="make test-ray installs Ray and runs docs/ray.md")
        warnings.simplefilter("ignore")  # Ray's own code warns
    program = examples(document)
    exec(compile(program, str(document), "exec"), {"__name__": "__main__"})
    left = set(outdated(document, capsys.readouterr().out))
    assert left == set() if unpinned() else left <= NOTHING_PINNED


@pytest.mark.usefixtures("accelerator")
def test_the_page_on_devices_runs_where_there_is_an_accelerator():
    document = ROOT / "docs" / "memory.md"
    exec(compile(examples(document), str(document), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)[)#]", document.read_text()):
        if target == "benchmarks/index.md":  # docs/hooks.py puts it into the site
            continue
        assert (document.parent / target).exists(), f"{document.name}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_code_block_says_its_language(document):
    assert all(found[1] for found in FENCE.finditer(own_text(document)))


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_code_fits_80_columns(document):
    """A wider block scrolls sideways on a phone. The tree of modules is a table as text."""
    text = document.read_text()
    wide = [
        f"{document.name}:{text.count(chr(10), 0, found.start()) + 2 + number}: {line}"
        for found in re.finditer(r"^```[^\n]*\n(.*?)^```$", text, re.M | re.S)
        if not found[1].startswith("pipegraph/\n")
        for number, line in enumerate(found[1].splitlines())
        if len(line) > 80
    ]
    assert not wide, "\n".join(wide)


def test_the_readme_begins_with_the_two_commands_and_shows_a_short_example():
    text = (ROOT / "README.md").read_text()
    blocks = FENCE.findall(text)
    assert [line.split("#")[0].strip() for line in blocks[0][1].splitlines()] == ["make demo", "make test"]
    lines = [line for line in next(code for kind, code in blocks if kind == "python").splitlines() if line]
    assert 8 <= len(lines) <= 15


def test_every_dependency_is_in_the_documentation():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "dependencies.md").read_text()
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += [each for each in extra if not each.startswith("pipegraph")]
    for each in wanted:
        name = re.match(r"[A-Za-z0-9_-]+", each)[0]
        assert name.lower() in text.lower(), f"docs/dependencies.md does not say what {name} is for"
