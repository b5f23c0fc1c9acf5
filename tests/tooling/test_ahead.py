"""Predictions that are stored before the calls are measured, and the errors of these predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.common import shapes
from bench.pages import ahead
from weft.plans import Decomposed, Plan, Sequential


def results_with(tmp_path: Path, *measured: tuple[str, Plan, float]) -> Path:
    """Return results with two predictions of one shape, and rows of that shape: (date, plan, us)."""
    shape = dict(op="matmul_all_reduce", name="MLP-1", M=8192, N=4096, K=1376, world=8)
    fixed = dict(card="a", profile="a-x4", made="2026-11-22", date="2026-11-26T12:00:00+00:00")
    plans = {Sequential(): 110.0, Decomposed(): 90.0}
    rows = [shape | dict(plan=json.loads(plan.to_json()), predicted=us) | fixed for plan, us in plans.items()]
    (tmp_path / "predictions-8.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "a-x8").mkdir()
    timed = dict(shape, mode="graph", method="auto", gemm_us=1.0, comm_us=1.0)
    lines = [json.dumps(timed | dict(date=date, plan=plan.to_json(), us=us)) for date, plan, us in measured]
    (tmp_path / "a-x8/matmul_all_reduce.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_only_calls_measured_after_the_prediction_count(tmp_path: Path) -> None:
    late, early = "2026-11-27T00:00:00+00:00", "2026-11-20T00:00:00+00:00"
    calls = (late, Sequential(), 100.0), (late, Sequential(), 120.0), (early, Decomposed(), 100.0)
    results = results_with(tmp_path, *calls)
    assert ahead.errors(8, results) == {("a-x4", "sequential"): [pytest.approx(0.0)]}
    assert "| a-x4 | sequential | 1 | 0.0% | +0.0% |" in ahead.section(8, results)


def test_the_page_reports_that_nothing_was_measured(tmp_path: Path) -> None:
    assert "2 times of calls on 8 GPUs were predicted on 2026-11-26" in (
        text := ahead.section(8, results_with(tmp_path))
    )
    assert text.endswith("None of these calls has been measured since.\n")


def test_every_plan_that_is_tuned_is_predicted() -> None:
    """The plan that the planner chooses, one of the fastest, is among them."""
    rows = list(ahead.predicted("nvidia-h200-x4", 8, "now", shapes.TILELINK[:1]))
    for op in ahead.OPS:
        times = {json.dumps(row["plan"]): row["predicted"] for row in rows if row["op"] == op}
        (chosen,) = (row["predicted"] for row in rows if row["op"] == op and row["chosen"])
        assert len(times) > 1 and chosen <= min(times.values()) < times['{"kind": "sequential"}']
