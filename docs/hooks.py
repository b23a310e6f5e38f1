"""For the site: the newest page of benchmarks/results/ and its pictures, as benchmarks/."""

from pathlib import Path

from mkdocs.structure.files import File

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def on_files(files, config):
    """Called by MkDocs when it has listed docs/."""
    newest = max(RESULTS.glob("????-??-??.md"))
    files.append(
        File.generated(config, "benchmarks/index.md", abs_src_path=str(newest))
    )
    for picture in RESULTS.glob(f"{newest.stem}-*.svg"):
        files.append(
            File.generated(
                config, f"benchmarks/{picture.name}", abs_src_path=str(picture)
            )
        )
    return files
