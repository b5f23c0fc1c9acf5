"""Record in tests/trends.csv the minutes that long commands need:

    python -m tests.tooling.trends NAME COMMAND ...
    python -m tests.tooling.trends NAME --seconds N

Run the command and, if it succeeds, add a line; or add a line for a command that took N seconds. A line contains the
date, the command's name, the minutes, the number of cores, and the version of weft, which is the name of the code in
src/weft (gpu_queue.py). The file keeps the last line of each day, for the newest KEPT days of each command.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.gpu.gpu_queue import WEFT, tree_of

FILE = Path(__file__).parents[1] / "trends.csv"
KEPT = 10


def note(name: str, minutes: float, tree: str, date: str = "") -> None:
    date = date or time.strftime("%Y-%m-%d")
    old = [row for row in csv.reader(FILE.read_text().splitlines()) if row] if FILE.exists() else []
    same = [row for row in old if row[1] == name and row[0] != date]
    new = [date, name, f"{minutes:.1f}", str(os.cpu_count()), tree[:12]]
    rest = [row for row in old if row[1] != name]
    with FILE.open("w") as file:
        csv.writer(file, lineterminator="\n").writerows(
            sorted([*rest, *same[-KEPT + 1 :], new], key=lambda row: (row[1], row[0]))
        )


def main() -> int:
    name, *command = sys.argv[1:]
    began, code = time.time(), 0
    if command[0] == "--seconds":
        began -= float(command[1])
    else:
        code = subprocess.run(command).returncode
    if code == 0:
        note(name, (time.time() - began) / 60, tree_of(WEFT))
    return code


if __name__ == "__main__":
    sys.exit(main())
