"""The table of sizes drawn at random."""

from __future__ import annotations

from typing import Any

from bench.pages.drawn_page import drawn


def rows_of(m: int, us: dict[str, float], date: str = "2026-01-01", commit: str = "aaaa") -> list[dict[str, Any]]:
    fixed = dict(op="all_gather_matmul", M=m, N=8, K=16, mode="graph", seed=1, date=date, commit=commit)
    return [dict(fixed, method=method, us=time) for method, time in us.items()]


def test_auto_is_compared_with_nccl_and_with_the_best_library_of_the_newest_run() -> None:
    rows = rows_of(128, {"sequential": 200.0, "auto": 100.0, "torch symm_mem": 90.0})
    rows += rows_of(256, {"sequential": 100.0, "auto": 400.0})
    rows += rows_of(256, {"sequential": 100.0, "auto": 50.0}, date="2026-01-02", commit="bbbb")
    line = "| 1 | all-gather + GEMM | graph | **2.00x** | 1.34x | 0.90x | 1 of 2 | `aaaa`, `bbbb` |"
    text = drawn(rows)
    assert line in text
    assert text.endswith("Below 0.98x of the best library: all-gather + GEMM 128x8x16 (graph) 0.90x, 100 us.")
