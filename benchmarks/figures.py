"""Writes the measured figures of the pages from the newest records: contestants, best peer and losses are computed.

Each table stands between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``; what is between them is replaced.

    python benchmarks/figures.py            # rewrite README.md and the pages of docs/ that have some
    python benchmarks/figures.py --check    # exit code 1 if a figure differs from its record
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import catalogue
from records import RESULTS
from tables import peers, races

ROOT = Path(__file__).parents[1]
PAGES = ("memory", "images", "reader", "schedules")
DOCUMENTS = [ROOT / "README.md", ROOT / "benchmarks/README.md", *(ROOT / f"docs/{name}.md" for name in PAGES)]
MARKED = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.S)
CLOSE = 0.99
"""A ratio to the best peer from which on nobody is called ahead: the spread of one run is wider."""


@dataclass(frozen=True)
class Record:
    """The newest row of one file.

    Attributes:
        path: relative to the repository.
        entries: comparison by its part ("" for the only one) -> contestant -> measure -> spread.
        rounds: alternated rounds of which the medians are.
    """

    path: str
    entries: dict[str, dict[str, Any]]
    rounds: int


def latest(name: str) -> tuple[Path, dict[str, Any]]:
    """The newest file of a comparison, and its last row."""
    path = sorted(RESULTS.glob(f"????-??-??-{name}.jsonl"))[-1]
    return path, json.loads(path.read_text().splitlines()[-1])


def newest(name: str) -> Record:
    """The newest record of a comparison."""
    path, row = latest(name)
    found = {
        part.removeprefix(name).removeprefix(", "): entries for part, entries in races(row["results"], name)
    }
    return Record(f"benchmarks/results/{path.name}", found, row["configuration"].get("rounds", 1))


def median(entries: dict[str, Any], name: str, measure: str) -> float:
    return entries[name][measure]["median"]


def three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{float(f'{value:.3g}'):g}"


@dataclass(frozen=True)
class Line:
    """A line of a table that shows ours, the best peer and DataLoader."""

    text: str
    record: str  # name of its records
    ours: str  # our contestant
    measure: str = "cpu_s_per_unit"
    unit: str = "ms"
    factor: float = 1e3
    part: str = ""  # which comparison of the record

    def cells(self) -> list[str]:
        record = newest(self.record)
        found = record.entries[self.part]
        entries = {name: entry for name, entry in found.items() if self.measure in entry}
        others = [name for name in peers(entries) if not name.startswith("DataLoader")]
        torchs = [name for name in peers(entries) if name.startswith("DataLoader")]
        best = [self.ours, *(min(group, key=self.cost(entries), default="") for group in (others, torchs))]
        least = min(filter(None, best), key=self.cost(entries))
        cells = []
        for name in best:
            if not name:
                cells.append("-")
                continue
            cell = f"{three_digits(median(entries, name, self.measure) * self.factor)} {self.unit}"
            cell = f"**{cell}**" if name == least else cell
            cells.append(cell if name == self.ours else f"{cell} ({name})")
        return [f"{self.text} ([record]({record.path}))", *cells]

    def cost(self, entries: dict[str, Any]) -> Callable[[str], float]:
        sign = -1 if self.measure == "rate" else 1
        return lambda name: sign * median(entries, name, self.measure)


FIRST = (
    Line(
        "training a ResNet-18 from JPEG files on one H100, 14 workers",
        "gpu_training",
        "pipegraph, 14 processes",
        measure="rate",
        unit="images/s",
        factor=1,
    ),
    Line(
        "memory of all processes (PSS), 4 workers",
        "memory_peak",
        "pipegraph: batch, DecodeImage",
        measure="pss_mb",
        unit="MB",
        factor=1,
        part="4 workers",
    ),
    Line("resuming after 20,000 rows, CPU until the next batch", "resume", "pipegraph, threads"),
    Line("passing an item through 4 stages, CPU", "hop_cost", "pipegraph", unit="us", factor=1e6, part="4"),
)
LARGE = (Line("CPU per image at 3000 x 2000", "image_recipe_large", "pipegraph, auto"),)


def against_peers(lines: tuple[Line, ...]) -> str:
    """A table of ours, the best peer and DataLoader; the least of each line is bold."""
    rows = [line.cells() for line in lines]
    return markdown(["median of alternated rounds", "pipegraph", "best other loader", "DataLoader"], rows)


def ranking(name: str, title: str, unit: str, factor: float, part: str = "", suffix: str = "") -> str:
    """Every contestant of a comparison, the cheapest first."""
    record = newest(name)
    entries = record.entries[part]
    ordered = sorted(entries, key=lambda contestant: median(entries, contestant, "cpu_s_per_unit"))
    rows = [[each, three_digits(median(entries, each, "cpu_s_per_unit") * factor)] for each in ordered]
    head = f"[{title}]({record.path}){suffix}, median of {record.rounds} rounds"
    return markdown([head, f"{unit} of CPU per item"], rows)


MEASURES = {
    "rate": "throughput",
    "cpu_s_per_unit": "throughput per CPU second",
    "both_s": "import to first batch",
}
"""What losses are looked for in. ``rate``: more is better."""


def losses() -> str:
    """Every comparison of the newest records in which a peer is ahead of us, as a ratio below one."""
    rows = [
        [what, f"{ratio:.2f}", MEASURES[measure], peer]
        for what, entries, ours, others in comparisons()
        for measure in MEASURES
        for ratio, peer in [behind(entries, ours, others, measure)]
        if ratio < CLOSE
    ]
    return markdown(["where a peer is ahead", "pipegraph / peer", "measured by", "peer"], rows)


def comparisons() -> Iterator[tuple[str, dict[str, Any], list[str], list[str]]]:
    """(what, entries, our contestants, the peers): every comparison, and those that the catalogue sets apart."""
    questions = {entry.record: entry for entry in catalogue.SET}
    for name in sorted({path.name[11:-6] for path in RESULTS.glob("*.jsonl")}):
        for part, entries in newest(name).entries.items():
            entry = questions.get(name)
            what = (entry.question if entry else name.replace("_", " ")) + (f" ({part})" if part else "")
            apart = entry.apart if entry else ()
            for kind in apart:
                others = [peer for peer in peers(entries) if kind.among in peer]
                yield f"{what}: {kind.name}", entries, [kind.ours], others
            held = {kind.ours for kind in apart}
            ours = [each for each in entries if each.startswith(("pipegraph", "pg.")) and each not in held]
            others = [peer for peer in peers(entries) if not any(k.among and k.among in peer for k in apart)]
            yield what, entries, ours, others


def behind(entries: dict[str, Any], ours: list[str], others: list[str], measure: str) -> tuple[float, str]:
    """Our best over the best peer, above one if we are ahead; infinite where it was not measured."""
    costs = {
        name: 1 / median(entries, name, measure) if measure == "rate" else median(entries, name, measure)
        for name in (*ours, *others)
        if measure in entries[name]
    }
    mine = min((costs[name] for name in ours if name in costs), default=None)
    peer = min((name for name in others if name in costs), key=costs.__getitem__, default=None)
    if mine is None or peer is None:
        return float("inf"), ""
    return costs[peer] / mine, peer


def markdown(headers: list[str], rows: list[list[str]]) -> str:
    """A table; cells that begin with a letter in the first row are aligned left."""
    aligned = ["---" if re.match("[a-zA-Z]", cell) else "---:" for cell in rows[0]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [headers, aligned, *rows]) + "\n"


def results_of(name: str) -> Any:
    return latest(name)[1]["results"]


def interpolations() -> str:
    """How far each interpolation is from torchvision's evaluation, and its CPU time over that of ``linear``."""
    found = {(row["backend"], row["interpolation"]): row for row in results_of("interpolation")["rows"]}
    heads, rows = ["`interpolation=`"], []
    for backend in ("OpenCV, simplejpeg", "Pillow"):
        heads += [f"{backend}: mean (worst image)", "CPU"]
    for kind in dict.fromkeys(kind for _, kind in found):
        row = [f'`"{kind}"`']
        for one in (found["opencv", kind], found["pillow", kind]):
            mean, worst = three_digits(one["mean"]), three_digits(one["worst_image"])
            row += [f"{mean} ({worst})", f"{one['cost']:.1f}x"]
        rows.append(row)
    for measure in ("mean", "worst_image"):
        assert all(found["opencv", kind][measure] == found["simplejpeg", kind][measure] for _, kind in found)
    return markdown(heads, rows)


def schedules() -> str:
    """What the newest run of the models explored, and the newest in which every line was a switch point."""
    names = ("schedules", "schedules_lines")
    found = [results_of(name)["models"] for name in names]
    keys = ("schedules", "distinct", "lines")
    rows = [[f"all {len(found[0]) - 1}", *(f"{models['all'][key]:,}" for models in found for key in keys)]]
    return markdown(["models", *keys, *(f"{key}, at lines" for key in keys)], rows)


def idle() -> str:
    """How long two ranks waited for shards, as a share of the time; and how long a step did."""
    rows = [
        [
            name,
            f"{100 * found['idle']['median']:.2f} %",
            *(f"{found[key] / 1e3:,.2f}" for key in ("median_us", "p99_us", "most_us")),
        ]
        for name, found in results_of("reader_idle")["idle"].items()
        if "warm" not in name and "slow" not in name
    ]
    return markdown(["two ranks", "idle", "wait of a step, ms: median", "99 %", "longest"], rows)


def planted() -> str:
    """Of each kind of planted bottleneck: how often it was named, and how far the advice led in the worst case."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for name, found in results_of("planted").items():
        kinds.setdefault(name.rpartition(" ")[0], []).append(found)
    rows = [
        [
            kind,
            f"{sum(found['named'] == 'right' for found in each)} of {len(each)}",
            f"{min(found['of the best'] for found in each):.2f}",
        ]
        for kind, each in kinds.items()
    ]
    return markdown(["planted", "named rightly", "least rate by the advice / best of the grid"], rows)


def spread(found: dict[str, float]) -> str:
    """A ratio with its lowest and highest round."""
    return f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def gpu() -> str:
    """What ran on a real GPU: tests, copies, replicas."""
    check, traced = results_of("gpu_check"), results_of("host_to_device_trace")
    copies, slots = newest("host_to_device").entries[""], newest("replica_parts").entries[""]
    tests, memory, waits = check["tests"], traced["memory"], traced["trace"]
    fed, stays = (
        f"{100 * waits[each]['waits_us'] / waits[each]['span_us']:.2f} %" for each in ("fed", "resident")
    )
    two = next(name for name in slots if name.endswith("2 slots"))
    loader, plain = (spread(copies[name]["over"]["bare"]) for name in ("pipegraph", ".to per batch"))
    one, both = (spread(slots[name]["over"]["plain"]) for name in ("executor, 1 slot", two))
    assert check["passed"]
    rows = [
        "tests of devices: ran, failed, skipped",
        f"{tests['ran']}, {tests['failures'] + tests['errors']}, {tests['skipped']}",
        "batches of 38.5 MB to the device, of the rate of a bare copy loop",
        loader,
        "the same by `.to(device)` of each batch",
        plain,
        "the compute stream waited, of its time: fed, and with one batch that stays",
        f"{fed}, {stays}",
        "slabs on the device: made, planned at most",
        f"{memory['slabs']}, {memory['planned_slabs']}",
        "steps of a ResNet-18 (32 x 3 x 64 x 64), of a plain loop: one slot, two slots of one GPU",
        f"{one}, {both}",
    ]
    return markdown(
        [f"on one {gpu_name()}", "measured"], [rows[at : at + 2] for at in range(0, len(rows), 2)]
    )


def gpu_name() -> str:
    name: str = latest("gpu_check")[1]["configuration"]["device"]["name"]
    return name


def gil() -> str:
    """How long an image holds the interpreter's lock, and how fast images come."""
    ways = {"compiled": "auto", "OpenCV": "opencv"}
    rows = []
    for name, decoder in ways.items():
        for place in ("2 thread", "14 thread", "14 process"):
            quiet, busy = (results_of("gil")[f"{decoder} {place} {beside}"] for beside in ("quiet", "busy"))
            held = [f"{each['held_us']['median']:.0f}" for each in (quiet, busy)]
            rate = [f"{1e6 / each['wall_us']['median']:,.0f}" for each in (quiet, busy)]
            noun = "es" if place.endswith("process") else "s"
            rows.append([f"{name}, {place}{noun}", held[0], rate[0], held[1], rate[1]])
    head = ["photographs, 2 cores", "us of GIL per image", "images/s"]
    return markdown([*head, "the same beside a loop that never lets it go", "images/s"], rows)


def gpu_training() -> str:
    """Photographs from files to a GPU's training steps."""
    entries = newest("gpu_training").entries[""]
    ordered = sorted(entries, key=lambda name: -median(entries, name, "rate"))
    rows = [
        [
            "one batch that stays on the GPU" if name == "resident" else name,
            f"{median(entries, name, 'rate'):,.0f}",
            three_digits(median(entries, name, "cpu_s_per_unit") * 1e3),
        ]
        for name in ordered
    ]
    return markdown([f"ResNet-18 on one {gpu_name()}, 16 cores", "images/s", "ms of CPU per image"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "first": lambda: against_peers(FIRST),
    "losses": losses,
    "decode": lambda: ranking("image_decode", "Photographs decoded and resized", "ms", 1e3),
    "large": lambda: against_peers(LARGE),
    "idle": idle,
    "gpu": gpu,
    "gpu_training": gpu_training,
    "gil": gil,
    "schedules": schedules,
    "interpolations": interpolations,
    "planted": planted,
    "hops": lambda: ranking("hop_cost", "A chain of trivial functions", "us", 1e6, "4", " at 4 stages"),
}


def rewritten(document: Path, text: str) -> str:
    """The text of a document with every marked table from today's records, with links from its folder."""
    links = "(results/" if document.parent == RESULTS.parent else "(benchmarks/results/"
    return MARKED.sub(
        lambda found: found[1] + TABLES[found[2]]().replace("(benchmarks/results/", links) + found[3], text
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 if a figure differs"
    )
    options = parser.parse_args()
    new = {document: rewritten(document, document.read_text()) for document in DOCUMENTS}
    old = [document for document, text in new.items() if text != document.read_text()]
    if options.check and old:
        names = ", ".join(document.name for document in old)
        raise SystemExit(f"{names}: figures are not those of the records; run benchmarks/figures.py")
    for document in old:
        document.write_text(new[document])


if __name__ == "__main__":
    main()
