"""The set that is compared with other loaders: which scripts, with which arguments, and the names of their records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    """One comparison.

    Attributes:
        record: name of its records.
        question: what it answers.
        script: without ``.py``.
        arguments: besides rounds and images.
        images: whether it needs photographs.
        others: whether it takes peers from other environments (``--other``).
    """

    record: str
    question: str
    script: str
    arguments: tuple[str, ...] = ()
    images: bool = False
    others: bool = False

    @property
    def written(self) -> bool:
        """Whether there is such a script."""
        return (FOLDER / f"{self.script}.py").exists()


SET = (
    Entry("hop_cost", "what a stage costs", "hop_cost"),
    Entry("small_rows", "a million rows of floats, shuffled", "small_rows"),
    Entry("tokens", "windows of tokens from one long array", "tokens"),
    Entry("python_transform", "a transform that holds the GIL", "python_transform"),
    Entry("transport", "items from a worker process", "transport"),
    Entry("process_runs", "neighbouring process stages in one process", "process_runs"),
    Entry("isolate", "what a loader takes from the training loop", "isolate"),
    Entry("host_to_device", "batches copied to a device", "host_to_device"),
    Entry("start_up", "import, and start to the first batch", "start_up", images=True),
    Entry("image_decode", "photographs decoded and resized", "image_decode", images=True),
    Entry("image_recipe", "the ImageNet training recipe", "image_recipe", images=True, others=True),
    Entry(
        "image_recipe_large",
        "the same at 3000 x 2000",
        "image_recipe",
        ("--large",),
        images=True,
        others=True,
    ),
    Entry("memory_peak", "peak memory of all processes", "memory_peak", images=True),
)


def environments(root: Path) -> list[str]:
    """Interpreters of the peers' further environments: ``.venv-NAME`` beside the main ones."""
    found = sorted(root.glob(".venv-*/bin/python"))
    return [str(path) for path in found if path.parent.parent.name != ".venv-bench"]
