"""The whole set against the peers, then the day's Markdown page and pictures.

python benchmarks/run_all.py --rounds 5 --images FOLDER
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from images import add_images_option

FOLDER = Path(__file__).parent
PLAIN = ("hop_cost", "small_rows", "tokens", "python_transform")
WITH_IMAGES = ("start_up", "image_decode", "image_recipe", "memory_peak")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="alternated rounds of each (default 5)")
    parser.add_argument("--skip", default="", help="comma-separated scripts to leave out")
    add_images_option(parser)
    options = parser.parse_args()
    rounds = ["--rounds", str(options.rounds)]
    commands = [[name, *rounds] for name in PLAIN]
    if options.images:
        images = ["--images", options.images]
        commands += [[name, *rounds, *images] for name in WITH_IMAGES]
        commands.append(["image_recipe", *rounds, *images, "--large"])
    else:
        print(
            "no photographs (--images FOLDER or PIPEGRAPH_TEST_IMAGES): leaving out", ", ".join(WITH_IMAGES)
        )
    failed = []
    for name, *arguments in commands:
        if name in options.skip.split(","):
            continue
        print(f"\n== {name} {' '.join(arguments)}", flush=True)
        if subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), *arguments], check=False).returncode:
            failed.append(name)
    print(flush=True)
    today = datetime.now(UTC).date().isoformat()
    subprocess.run([sys.executable, str(FOLDER / "report.py"), "--date", today], check=True)
    pictures = map(str, sorted((FOLDER / "results").glob(f"{today}-*.jsonl")))
    subprocess.run([sys.executable, str(FOLDER / "plot.py"), *pictures], check=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
