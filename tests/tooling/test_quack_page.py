"""The tables of bench/results/quack.md, generated from made-up rows."""

from __future__ import annotations

import json
from pathlib import Path

from bench.pages import quack_page

BENCH = Path(__file__).parents[2] / "bench"
RESULTS = BENCH / "results"


def row(name: str, method: str, us: float) -> dict:
    return dict(op="all_gather_matmul", name=name, mode="graph", method=method, us=us)


def test_forms_count_by_their_fastest_and_the_newest_row_counts() -> None:
    times = {
        "sequential": 120.0,
        "auto": 100.0,
        "auto without quack": 110.0,
        "flag_gated 1": 99.0,
        "flag_gated 2": 90.0,
        "quack 1": 99.0,
    }
    rows = [row("a", "auto", 5.0), *(row("a", method, us) for method, us in times.items()), row("a", "quack 2", 95.0)]
    lines = quack_page.gathered(rows).splitlines()
    assert lines[-2] == "| a | 120 | 110 | 100 | 90 | 95 | 1.10x | 0.95x |"
    assert lines[-1].endswith("| 1.10x | 0.95x |") and lines[-1].startswith("| geometric mean |")


def test_gemms_alone() -> None:
    times = {"cuBLAS": 100.0, "quack 1": 90.0, "quack 2": 80.0, "flat 1": 99.0, "told 1": 97.0, "shared": 96.0}
    lines = quack_page.gemms([dict(M=1, N=2, K=3, us=times)]).splitlines()
    assert lines[-2] == "| 1 x 2 x 3 | 100 | 80 (2) | 96 | 1.25x | 1.04x | 0.83x |"


def test_auto_is_never_slower_than_without_quack() -> None:
    """In the newest row of each shape, "auto" is at most 1% slower with quack than without it; the times of equal plans
    differ by as much."""
    newest: dict[tuple[str, str], dict[str, float]] = {}
    for path in RESULTS.glob("*/quack/all_gather_matmul.jsonl"):
        for r in map(json.loads, path.read_text().splitlines()):
            newest.setdefault((path.parts[-3], r["name"]), {})[r["method"]] = r["us"]
    assert newest and all(us["auto"] < 1.01 * us["auto without quack"] for us in newest.values()), newest
