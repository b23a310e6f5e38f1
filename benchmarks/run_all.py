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


def chosen(only: str, skip: str, photographs: bool) -> list[catalogue.Entry]:
    """What is to be run; whatever is left out is said.

    Raises:
        SystemExit: a name is not in the set.
    """
    wanted, unwanted = ({name for name in names.split(",") if name} for names in (only, skip))
    known = {entry.record for entry in catalogue.SET}
    if strange := (wanted | unwanted) - known:
        raise SystemExit(
            f"not in the set: {', '.join(sorted(strange))}; there are {', '.join(sorted(known))}"
        )
    entries = []
    for entry in catalogue.SET:
        if (wanted and entry.record not in wanted) or entry.record in unwanted:
            continue
        if entry.images and not photographs:
            print(
                f"left out: {entry.record}: no photographs (--images FOLDER or PIPEGRAPH_TEST_IMAGES)",
                flush=True,
            )
        else:
            entries.append(entry)
    return entries


def main() -> None:
    parser = harness.arguments(__doc__, images=True)
    parser.add_argument("--skip", default="", help="comma-separated names of what to leave out")
    options = parser.parse_args()
    entries = chosen(options.only, options.skip, bool(options.images))
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
