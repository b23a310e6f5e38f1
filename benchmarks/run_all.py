"""The set against the peers, then the day's Markdown page.

python benchmarks/run_all.py --rounds 5 --images FOLDER
python benchmarks/run_all.py --only image_recipe,tokens
python benchmarks/run_all.py --skip memory_peak
"""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import catalogue
import harness
import records

FOLDER = Path(__file__).parent


def main() -> None:
    parser = harness.arguments(__doc__, images=True)
    parser.add_argument("--skip", default="", help="comma-separated names of what to leave out")
    options = parser.parse_args()
    wanted, unwanted = ({name for name in names.split(",") if name} for names in (options.only, options.skip))
    known = {entry.record for entry in catalogue.SET}
    if strange := sorted((wanted | unwanted) - known):
        raise SystemExit(f"not in the set: {', '.join(strange)}; there are {', '.join(sorted(known))}")
    entries = [e for e in catalogue.SET if e.record in (wanted or known) - unwanted]
    if not options.images:
        for entry in filter(lambda entry: entry.images, entries):
            print(
                f"left out: {entry.record}: no photographs (--images FOLDER or PIPEGRAPH_TEST_IMAGES)",
                flush=True,
            )
        entries = [entry for entry in entries if not entry.images]
    failed = []
    begin = time.monotonic()
    for number, entry in enumerate(entries, 1):
        command = [sys.executable, str(FOLDER / f"{entry.script}.py"), "--rounds", str(options.rounds)]
        command += [*entry.arguments, *(["--images", options.images] if entry.images else [])]
        spent = (time.monotonic() - begin) / 60
        print(
            f"\n== {number} of {len(entries)}: {entry.record}, {entry.question}; {spent:.1f} min so far",
            flush=True,
        )
        if subprocess.run(command, check=False).returncode:
            failed.append(entry.record)
    print(flush=True)
    today = datetime.now(UTC).date().isoformat()
    if any(records.RESULTS.glob(f"{today}-*.jsonl")):
        subprocess.run([sys.executable, str(FOLDER / "report.py"), "--date", today], check=True)
    print(f"{(time.monotonic() - begin) / 60:.1f} min")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
