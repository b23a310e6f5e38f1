"""The set that is compared with other loaders: which scripts, with which arguments, and the names of their records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """How many times as good as another loader ours has to be, at least."""

    least: float
    others: tuple[str, ...] = ()  # contestants, of which the best counts; empty: every peer
    measure: str = "rate"  # or a quantity of which less is better
    ours: str = ""  # our contestant, where the record has no ratios to one


@dataclass(frozen=True)
class Apart:
    """A way of using the loaders that is compared by itself."""

    name: str
    ours: str
    among: str = ""  # what the names of its peers contain


@dataclass(frozen=True)
class Entry:
    """One comparison."""

    record: str  # name of its records
    question: str
    script: str
    arguments: tuple[str, ...] = ()  # besides rounds and images
    images: bool = False  # whether it needs photographs
    goals: tuple[Goal, ...] = ()
    apart: tuple[Apart, ...] = ()


AHEAD = Goal(1)
DECODE = "pipegraph: batch, DecodeImage"
FULL_DECODE = ("DataLoader, OpenCV", "torchdata.nodes, threads", "SPDL, OpenCV", "Grain", "WebDataset")
SET = (
    Entry(
        "hop_cost",
        "cost per stage, by number of stages",
        "hop_cost",
        goals=(Goal(6, ("torchdata.nodes",)), Goal(30, ("SPDL",))),
    ),
    Entry(
        "small_rows",
        "a million rows of floats, shuffled",
        "small_rows",
        goals=(AHEAD,),
        apart=(Apart("row by row", "pipegraph, rows", "rows"),),
    ),
    Entry(
        "tokens",
        "windows of tokens from one long array",
        "tokens",
        goals=(AHEAD,),
        apart=(Apart("a list of indices and a function", "pipegraph, batches"),),
    ),
    Entry(
        "python_transform",
        "a transform that holds the GIL",
        "python_transform",
        goals=(Goal(0.95, ("hand-written process pool",)), AHEAD),
    ),
    Entry("host_to_device", "batches copied to a device", "host_to_device"),
    Entry(
        "start_up",
        "import, and start to the first batch",
        "start_up",
        images=True,
        goals=(Goal(1, measure="first_batch_s", ours=DECODE),),
    ),
    Entry(
        "start_up_processes",
        "import, and start to the first batch of worker processes",
        "start_up",
        ("--of", "processes"),
        apart=(Apart("a second loader", "pipegraph, DataLoader, second loader", "second loader"),),
    ),
    Entry(
        "start_up_threads",
        "import, and start to the first batch of a small graph in threads",
        "start_up",
        ("--of", "threads"),
        goals=(Goal(1, measure="both_s", ours="pipegraph, threads"),),
    ),
    Entry(
        "image_decode",
        "photographs decoded and resized",
        "image_decode",
        images=True,
        goals=(Goal(0.97, ("hand-written loop",)), AHEAD),
    ),
    Entry(
        "image_recipe",
        "the ImageNet training recipe",
        "image_recipe",
        images=True,
        goals=(
            Goal(1.4),
            Goal(2, ("DataLoader, Pillow",)),
            Goal(0.95, ("hand-written, OpenCV", "hand-written, region decode")),
        ),
    ),
    Entry(
        "image_recipe_large",
        "the same at 3000 x 2000",
        "image_recipe",
        ("--large",),
        images=True,
        goals=(Goal(2.5, FULL_DECODE),),
    ),
    Entry(
        "resume",
        "resuming in the middle of an epoch",
        "resume",
        goals=(
            Goal(20, ("DataLoader, batches drawn again",), "cpu_s_per_unit", "pipegraph, threads"),
            Goal(1, measure="cpu_s_per_unit", ours="pipegraph, threads"),
        ),
    ),
    Entry(
        "memory_peak",
        "peak memory of all processes",
        "memory_peak",
        images=True,
        goals=(Goal(2, ("DataLoader, processes",), "rss_mb", DECODE),),
    ),
    Entry("ordinary", "ordinary jobs, as a newcomer writes them", "ordinary", images=True, goals=(AHEAD,)),
    Entry("planted", "what a profile says of planted bottlenecks, and how far its advice leads", "planted"),
)
