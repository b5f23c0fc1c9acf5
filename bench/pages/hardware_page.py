"""The tables of docs/tested.md and docs/hardware.md: the results of checks on GPUs, including checks on a Hopper GPU
that ran code for an older GPU, from tests/gpu_record.json; the kernels that were compiled for each GPU, from
tests/architectures.json; and the cost of signals in such code, from bench/results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.pages.tables import grid
from weft.architectures import FEATURES, capability_of

BEGIN = "<!-- made by bench/pages/pages.py from tests/architectures.json and tests/gpu_record.json -->"
RECORD = "<!-- made by bench/pages/pages.py from tests/gpu_record.json -->"
TESTS = Path(__file__).parents[2] / "tests"
# tests/gpu/gpu_older.py --speed writes this file.
SPEED = Path(__file__).parents[1] / "results/nvidia-h100-x1/signaled_sm80.json"


def compiled(record: dict[str, Any]) -> str:
    rows = []
    for triton, targets in sorted(record.items()):
        for target in sorted(targets, key=capability_of):
            facts, gpu = targets[target], FEATURES[capability_of(target)]
            broken = ", ".join(sorted(facts["wrong"])) or "none"
            rows.append([target, gpu.gpus, triton, facts["date"], str(facts["launches"]), str(facts["registers"]), f"{facts['shared'] / 1024:.0f} of {gpu.shared_kib}", broken])  # fmt: skip
    head = [
        "compiled for",
        "as in",
        "by",
        "on",
        "launches",
        "most registers",
        "most KiB of shared memory",
        "cases that break a rule",
    ]
    return grid(head, rows)


def ran(record: dict[str, Any], older: bool = True) -> str:
    """Return the table of the checks that ran. older: whether the checks ran code compiled for an older GPU, or code
    for the GPU itself."""
    rows = []
    for place, checks in sorted(record.get("checks", {}).items()):
        if (", compiled for " in place) == older:
            outcomes = Counter(row["outcome"] for row in checks.values())
            dates = sorted({row["date"] for row in checks.values()})
            rows.append([place, str(outcomes["passed"]), str(outcomes["failed"]), dates[-1]])
    return grid(["on a Hopper GPU", "checks passed", "failed", "last on"], rows) if rows else "Nothing has run so yet."


def record() -> str:
    """Return the last result of each check, the checks that failed, and the number of random calls that ran."""
    stored = json.loads((TESTS / "gpu_record.json").read_text())
    failed_checks = []
    for place, checks in sorted(stored["checks"].items()):
        names = [name for name, row in checks.items() if row["outcome"] == "failed"]
        if names and ", compiled for " not in place:
            failed_checks.append(f"{listed(names)} ({place})")
    text = f"Failed in their last run: {'; '.join(failed_checks)}. " if failed_checks else ""
    text += f"Random calls: {stored['fuzz']['calls']:,}, of which {stored['fuzz']['wrong']} were wrong."
    return f"{ran(stored, older=False)}\n\n{text}"


def listed(checks: Iterable[str]) -> str:
    """Return the names of checks. Of more than three checks that begin with the same word, only the number is given."""
    groups = (list(group) for _, group in groupby(sorted(checks), key=lambda name: name.split()[0]))
    parts = ([f"{len(g)} of *{g[0].split()[0]} ..*"] if len(g) > 3 else [f"*{name}*" for name in g] for g in groups)
    return ", ".join(part for group in parts for part in group)


def speed(record: dict[str, Any]) -> str:
    """Return the cost of signals: the time with a group for each wave compared with one group, in the same loop."""
    shares = [100 * row[f"{where}: signals cost"] for row in record["rows"] for where in ("rows", "tiles")]
    where = f"{record['compiled_for']}, on {record['machine']}, {record['date'][:10]}"
    return f"Compiled for {where}: a signal for each wave took {min(shares):.1f}% to {max(shares):.1f}% of a GEMM's time at {len(record['rows'])} sizes."


def tables() -> str:
    paths = TESTS / "architectures.json", TESTS / "gpu_record.json", SPEED
    return "\n\n".join(
        make(json.loads(path.read_text())) for make, path in zip((compiled, ran, speed), paths, strict=True)
    )
