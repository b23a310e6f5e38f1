"""For the site: the newest benchmarks as a page, descriptions, and names of the API linked to the reference."""

import ast
import re
from html import escape
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
REFERENCE = ROOT / "docs" / "reference"

LONGEST = 160
"""Characters of a description that search engines show."""

SAME = {
    "live": "Live",
    "record": "Recording",
    "Scatter": "CopyToDevice",
}
"""Names that are described as another one."""


def on_files(files, config):
    """Called by MkDocs when it has listed docs/."""
    newest = max(RESULTS.glob("????-??-??.md"))
    files.append(
        File.generated(config, "benchmarks/index.md", abs_src_path=str(newest))
    )
    return files


def on_page_markdown(markdown, page, **others):
    """Called by MkDocs for each page before it is converted."""
    page.meta.setdefault("description", description(markdown))
    if page.file.src_uri == "api.md":
        return linked(markdown)
    if page.file.src_uri == "reference/operators.md":
        # Below the titles of its sections; only the bases have members.
        below = "\n    options: { heading_level: 3 }"
        alone = "\n    options: { members: false, heading_level: 3 }"
        return re.sub(
            r"^::: pipegraph\.(\w+)\S*",
            lambda found: (
                found[0] + (alone if found[1] == "operators" else below)
            ),
            markdown,
            flags=re.M,
        )
    return markdown


def description(markdown):
    """The first paragraph as plain text, cut behind a word; None where a page has none."""
    for paragraph in re.split(r"\n\s*\n", markdown):
        if re.match(r"[A-Za-z`*\[]", paragraph):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
            text = " ".join(re.sub(r"[`*]", "", text).split())
            if len(text) > LONGEST:
                text = text[:LONGEST].rsplit(" ", 1)[0] + " ..."
            return escape(text)
    return None


def linked(markdown):
    """The tables of names with each name a link to its reference."""
    places = reference()

    def row(found):
        return re.sub(r"`(\w+)`", link, found[0])

    def link(found):
        place = places.get(SAME.get(found[1], found[1]))
        return f"[{found[0]}]({place})" if place else found[0]

    return re.sub(r"^\| `[^|]* \|", row, markdown, flags=re.M)


def reference():
    """Name -> where the reference describes it, as ``reference/graph.md#pipegraph.graph.Graph``."""
    found = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for stated in re.findall(r"^::: (\S+)$", page.read_text(), re.M):
            for name in names(stated):
                path = (
                    stated
                    if stated.endswith(f".{name}")
                    else f"{stated}.{name}"
                )
                found[name] = f"reference/{page.name}#{path}"
        found.setdefault(page.stem, f"reference/{page.name}")
    return found


def names(stated):
    """The names that a line of the reference describes: all public ones of a module, else its own."""
    path = stated.removeprefix("pipegraph.").replace(".", "/")
    top = ROOT if path.startswith("operators/") else ROOT / "pipegraph"
    module = top / f"{path}.py"
    if not module.exists():
        return [stated.rpartition(".")[2]]
    return [
        node.name
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and not node.name.startswith("_")
    ]
